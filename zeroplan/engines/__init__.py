"""Engines: each says how large its buffers are, when it allocates and frees them, and how long a step takes."""
