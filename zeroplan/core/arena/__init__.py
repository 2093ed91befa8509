"""What the included runtime allocates: its flats, their sizes and their places, for the Arena and the predictor alike."""
