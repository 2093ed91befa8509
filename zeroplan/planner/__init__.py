"""The planner: a model, a workload and a cluster become MemoryPlans; it ties ledger, schedules and limits together."""
