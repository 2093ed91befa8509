"""Figures that papers print of memory, each beside what zeroplan plans for the same run."""
