"""Optimizers over flat shards: their formulas, the step with norm, clipping and overflow, loss scales, learning rates."""
