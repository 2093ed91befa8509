"""torch's FullyShardedDataParallel (FSDP 1): one flat parameter a block, sharded evenly over the ranks."""
