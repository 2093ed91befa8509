"""Benchmarks of zeroplan_runtime.kernels, named after what they measure. Each checks its results before it times them."""
