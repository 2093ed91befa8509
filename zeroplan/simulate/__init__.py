"""The CUDA caching allocator and the timeline, simulated."""
