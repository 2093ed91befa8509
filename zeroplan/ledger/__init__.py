"""The ledger: memory formulas, each stated once."""
