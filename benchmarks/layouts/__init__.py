"""Modelled times of layouts beside published runs."""
