"""Runs a person's own training command without a GPU, and plans from what it did; see docs/capture.md."""
