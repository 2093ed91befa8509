"""Integers that remember their derivation, so that one function serves estimate, explain and the docs.

A line is plain arithmetic over the fields of a facts object. Given plain integers it returns a plain integer. Given
:class:`Derived` integers it returns one that also holds the expression. ``int()``, ``max()`` and ``//`` would lose the
derivation, so lines use :func:`shard`, :func:`pow2` and :func:`fraction`.
"""

from __future__ import annotations

from typing import Final

_SUM: Final = 1
_PRODUCT: Final = 2
_ATOM: Final = 3


class Derived(int):
    """An int with the expression that it came from. Adding and multiplying keep the expression."""

    expr: str
    _rank: int

    def __new__(cls, value: int, expr: str, rank: int = _ATOM) -> Derived:
        """`value` with `expr`; `rank` says whether the expression needs brackets inside another."""
        self = super().__new__(cls, value)
        self.expr, self._rank = expr, rank
        return self

    def __add__(self, other: int) -> Derived:
        return _sum(self, other)

    def __radd__(self, other: int) -> Derived:
        return _sum(other, self)

    def __sub__(self, other: int) -> Derived:
        return Derived(int(self) - int(other), f"{_wrap(self, _SUM)} − {_wrap(other, _PRODUCT)}", _SUM)

    def __rsub__(self, other: int) -> Derived:
        return Derived(int(other) - int(self), f"{_wrap(other, _SUM)} − {_wrap(self, _PRODUCT)}", _SUM)

    def __mul__(self, other: int) -> Derived:
        return _product(self, other)

    def __rmul__(self, other: int) -> Derived:
        return _product(other, self)

    def __repr__(self) -> str:
        return f"Derived({int(self)}, {self.expr!r})"


def _wrap(value: int, rank: int) -> str:
    if not isinstance(value, Derived):
        return f"{value:,}" if value >= 10_000 else str(value)
    return f"({value.expr})" if value._rank < rank else value.expr


def _sum(a: int, b: int) -> Derived:
    if not isinstance(a, Derived) and a == 0:
        return b if isinstance(b, Derived) else Derived(b, str(b))
    if not isinstance(b, Derived) and b == 0:
        return a if isinstance(a, Derived) else Derived(a, str(a))
    return Derived(int(a) + int(b), f"{_wrap(a, _SUM)} + {_wrap(b, _SUM)}", _SUM)


def _product(a: int, b: int) -> Derived:
    for one, other in ((a, b), (b, a)):
        if not isinstance(one, Derived) and one == 1:
            return other if isinstance(other, Derived) else Derived(other, str(other))
    return Derived(int(a) * int(b), f"{_wrap(a, _PRODUCT)} × {_wrap(b, _PRODUCT)}", _PRODUCT)


def shard(total: int, parts: int) -> int:
    """Return the elements of one of `parts` equal shards, padded up: ⌈total / parts⌉."""
    value = -(-int(total) // int(parts))
    if int(parts) == 1 and isinstance(total, Derived):
        return total
    if isinstance(total, Derived) or isinstance(parts, Derived):
        return Derived(value, f"⌈{_wrap(total, _PRODUCT)} / {_wrap(parts, _ATOM)}⌉")
    return value


def pow2(count: int) -> int:
    """The next power of two (0 stays 0): what torch's pinned-memory allocator takes for a block of `count` bytes."""
    value = 1 << (int(count) - 1).bit_length() if count > 0 else 0
    return Derived(value, f"pow2({_wrap(count, _SUM)})") if isinstance(count, Derived) else value


def fraction(count: int, numerator: int, denominator: int) -> int:
    """⌈count × numerator / denominator⌉, for bytes an element that are no whole number."""
    if denominator == 1:
        return count * numerator
    if not isinstance(count, Derived):
        return -(-count * numerator // denominator)
    value = -(-int(count) * numerator // denominator)
    return Derived(value, f"⌈{_wrap(count, _PRODUCT)} × {expression(numerator)} / {expression(denominator)}⌉")


def expression(value: int) -> str:
    """Return the value's expression, or the value itself."""
    return value.expr if isinstance(value, Derived) else f"{value:,}"
