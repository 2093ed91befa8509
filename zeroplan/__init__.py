"""zeroplan: the memory of a ZeRO training run, before the GPUs are rented."""

