"""recommend(): candidates, their step times, the fastest that fits, and why."""
