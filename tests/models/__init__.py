"""Tests of zeroplan.models."""
