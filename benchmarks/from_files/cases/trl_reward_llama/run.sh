python -m trl.scripts.reward --config recipe.yaml
