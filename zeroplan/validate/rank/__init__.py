"""The program of one rank: it builds the model under an engine, trains a few steps and measures. Imports torch."""
