"""What every layer stands on and no noun is: files read and written, the compiled library, hooks of display and progress."""
