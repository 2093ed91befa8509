"""Runs that strangers reported in public, beside their plans."""
