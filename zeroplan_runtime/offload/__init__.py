"""Buffers in other places than the GPU: optimizer, parameters and saved activations on the host, states in files."""
