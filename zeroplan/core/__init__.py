"""The nouns that every layer shares: buffers, places, phases, workload, cluster, ZeroConfig, units of size, errors."""
