"""What runs on a rank: builds the model under an engine, trains a few steps, measures. Imports torch."""
