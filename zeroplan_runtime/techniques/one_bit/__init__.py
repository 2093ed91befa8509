"""Exchanges of momenta that the 1-bit optimizers compress, and their schedules; see docs/one_bit.md."""
