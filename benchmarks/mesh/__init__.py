"""Rank 0 of a mesh of fake ranks on a real GPU: what the caching allocator does for 8 to 64 ranks, measured with one."""
