"""Megatron-Core's own GPT model, DDP, optimizer and schedules on real GPUs, beside the plans of ``--engine megatron``."""
