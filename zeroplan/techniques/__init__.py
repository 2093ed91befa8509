"""Techniques: one file each, and one row in :mod:`zeroplan.techniques.table`."""
