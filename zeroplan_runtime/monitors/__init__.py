"""Monitors of a training: the ds_config's sections ``tensorboard``, ``wandb`` and ``csv_monitor``."""
