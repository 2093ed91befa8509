"""The optimizer's step over flat shards, its parameter groups, the loss scale and learning-rate schedules."""
