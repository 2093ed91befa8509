"""verify(): predicts a run, makes it, measures it, and holds the one against the other."""
