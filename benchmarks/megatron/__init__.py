"""Megatron-Core's own GPT model, DDP, optimizer and schedules on real GPUs, beside the plans of ``--engine megatron``."""

# Before Megatron-Core, which asks whether there is a GPU: this lets torch answer without a context in the parent of the ranks.
from benchmarks import forked

__all__ = ["forked"]
