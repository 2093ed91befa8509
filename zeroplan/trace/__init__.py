"""Fake-tensor tracing: the only part of zeroplan that imports torch."""
