"""DeepSpeed's own unit tests, run on the included runtime: see ``__main__``."""
