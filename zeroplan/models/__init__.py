"""Sources of a ModelSpec: the catalog, a config, the hub, checkpoint headers, a live module or a bare count."""
