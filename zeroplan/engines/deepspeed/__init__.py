"""DeepSpeed 0.19: its ledger (`lines`), the numbers the ledger reads (`facts`), and its schedules."""
