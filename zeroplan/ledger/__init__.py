"""All memory formulas, each stated once."""
