"""Plans as text, JSON, HTML and pictures; no formulas here."""
