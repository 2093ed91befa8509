"""The versions that predictions are held against, stated once."""

#: The torch of the measured GPU runs.
TORCH_GPU = "2.11.0"
TRANSFORMERS = "5.17.0"
