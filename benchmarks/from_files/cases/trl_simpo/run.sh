python cpo.py --config recipe.yaml
