python -m trl.scripts.kto --config recipe.yaml
