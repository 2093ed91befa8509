python orpo.py --config recipe.yaml
