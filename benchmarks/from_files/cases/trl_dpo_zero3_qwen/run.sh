accelerate launch --config_file accelerate.yaml -m trl.scripts.dpo --config recipe.yaml
