python -m trl.scripts.dpo --config recipe.yaml
