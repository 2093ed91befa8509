"""Offload: optimizer, parameters and checkpointed activations in host memory, optimizer and parameters in files."""
