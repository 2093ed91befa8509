"""The runtime by the names of other programs."""
