"""Exchanges of momenta that the 1-bit optimizers compress, and their schedules; see docs/low_bit_optimizers.md."""
