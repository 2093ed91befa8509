"""Keeps transformers from warning of models that nobody trains: plans stand beside such lines on a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_alone() -> Iterator[None]:
    """Keep transformers' warnings back; it is imported before, since its import sets its own level."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(level)
