"""Megatron-LM: Megatron-Core's model, its gradient buffers, its optimizers and its pipeline schedules."""
