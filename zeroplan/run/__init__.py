"""What a run is asked to be: options, each declared once, and the Ask that holds who said which."""
