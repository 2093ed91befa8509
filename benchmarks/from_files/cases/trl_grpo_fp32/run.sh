python -m trl.scripts.grpo --config recipe.yaml
