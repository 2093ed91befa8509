"""When each engine allocates and frees what the ledger sizes."""
