"""Trains random models in random ways under the runtime and in plain torch, and compares the numbers."""
