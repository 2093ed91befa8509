python -m trl.scripts.sft --config recipe.yaml
