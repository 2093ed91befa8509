"""Checkpoints that any number of ranks and any stage can resume, and export of whole models."""
