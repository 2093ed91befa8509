"""The CUDA caching allocator, simulated: its rules, in Python and compiled, and the pinned host allocator beside it."""
