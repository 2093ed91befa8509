"""tune(): runs the configurations that recommend puts first on this machine, and ranks them by what they measure."""
