"""From a model, a workload and a cluster to MemoryPlans: ties ledger, schedules and limits together."""
