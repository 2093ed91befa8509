"""torch's DistributedDataParallel: fp32 parameters, 16-bit autocast, gradients all-reduced in buckets."""
