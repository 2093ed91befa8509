"""The tape: what a micro batch allocates and frees, its stored form, and the rewrites that a technique makes of it."""
