accelerate launch --config_file accelerate.yaml -m trl.scripts.grpo --config recipe.yaml
