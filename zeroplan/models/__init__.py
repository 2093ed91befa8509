"""Where a ModelSpec comes from: the catalog, a config, the hub, checkpoint headers, a live module or a bare count."""
