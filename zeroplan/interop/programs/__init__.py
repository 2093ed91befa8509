"""Programs whose files zeroplan reads: one module each, and what they share."""
