"""Refusals in the class that DeepSpeed raises, so that scripts which catch it still do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroplan.core.errors import BadInput


class Refusal(BadInput, AssertionError, NotImplementedError):
    """A :class:`~zeroplan.core.errors.BadInput`: where DeepSpeed refuses, it asserts or says that nothing is implemented."""


@contextmanager
def refusing() -> Iterator[None]:
    """Enters a context from which a BadInput comes out as a :class:`Refusal` with the same line."""
    try:
        yield
    except Refusal:
        raise
    except BadInput as fault:
        raise Refusal(fault.what, where=fault.where, remedy=fault.remedy) from None
