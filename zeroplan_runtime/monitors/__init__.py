"""What a training shows while it runs: the ds_config's sections ``tensorboard``, ``wandb`` and ``csv_monitor``."""
