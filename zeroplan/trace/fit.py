"""Exact expressions for sizes that were traced at several points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from zeroplan.tape.format import Size
from zeroplan.tape.sizes import Poly
from zeroplan.trace import kernels


class TracePoint(NamedTuple):
    """The numbers of one trace: micro batch, sequence length, LoRA rank (0 for no LoRA)."""

    batch: int
    seq: int
    rank: int = 0


class SizeForm(NamedTuple):
    """A size without its coefficients: the function, and the exponents of each argument's terms."""

    function: str
    exponents: tuple[tuple[tuple[int, int, int], ...], ...]

    @property
    def terms(self) -> int:
        """The number of points that determine the coefficients."""
        return max((len(e) for e in self.exponents), default=1) or 1


def form_of(size: Size) -> SizeForm:
    """Return the form of a fitted size."""
    return SizeForm(size.function, tuple(tuple((b, s, r) for _, b, s, r in poly) for poly in size.args))


class DoesNotFitError(ValueError):
    """The sizes at the traced points follow no short polynomial."""


_EXPONENTS = [(b, s, r) for r in (0, 1) for s in (0, 1, 2) for b in (0, 1)]


def fit_poly(points: Sequence[TracePoint], values: Sequence[int]) -> Poly:
    """Find the shortest polynomial with integer coefficients and at most three terms through all values.

    Raises:
        DoesNotFitError: when there is none.
    """
    if not any(values):
        return ()
    used = [e for e in _EXPONENTS if _distinguishable(e, points)]
    for terms in (1, 2, 3):
        if terms >= len(points) and terms > 1:
            break
        for exponents in itertools.combinations(used, terms):
            coefficients = _solve(points, values, exponents)
            if coefficients is not None:
                return tuple((c, *e) for c, e in zip(coefficients, exponents, strict=True))
    raise DoesNotFitError(f"{list(values)} at {list(points)}")


def _distinguishable(exponents: tuple[int, int, int], points: Sequence[TracePoint]) -> bool:
    """Return whether every variable with an exponent above 0 varies among the points."""
    return all(e == 0 or len({p[i] for p in points}) > 1 for i, e in enumerate(exponents))


def _value(point: TracePoint, exponents: tuple[int, int, int]) -> int:
    return int(point.batch ** exponents[0] * point.seq ** exponents[1] * point.rank ** exponents[2])


def _solve(points: Sequence[TracePoint], values: Sequence[int], exponents: Sequence[tuple[int, int, int]]) -> list[int] | None:
    """Solve for integer coefficients that hold at every point, or None. It solves on the first independent rows and checks on
    all.
    """
    n = len(exponents)
    if n == 1:
        base = _value(points[0], exponents[0])
        if base == 0 or values[0] % base:
            return None
        c = values[0] // base
        met = c != 0 and all(c * _value(p, exponents[0]) == v for p, v in zip(points, values, strict=True))
        return [c] if met else None
    rows = [[Fraction(_value(p, e)) for e in exponents] + [Fraction(v)] for p, v in zip(points, values, strict=True)]
    for column in range(n):
        pivot = next((i for i in range(column, len(rows)) if rows[i][column] != 0), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [x / rows[column][column] for x in rows[column]]
        for i, row in enumerate(rows):
            if i != column and row[column] != 0:
                factor = row[column]
                rows[i] = [x - factor * y for x, y in zip(row, rows[column], strict=True)]
    if any(row[n] != 0 for row in rows[n:]) or any(row[n].denominator != 1 or row[n] == 0 for row in rows[:n]):
        return None
    return [int(row[n]) for row in rows[:n]]


def _fit_form(points: Sequence[TracePoint], values: Sequence[int], exponents: tuple[tuple[int, int, int], ...]) -> Poly:
    if not exponents:
        if any(values):
            raise DoesNotFitError(f"{list(values)} are not all zero")
        return ()
    coefficients = _solve(points, values, exponents)
    if coefficients is None:
        raise DoesNotFitError(f"{list(values)} at {list(points)} have not the exponents {exponents}")
    return tuple((c, *e) for c, e in zip(coefficients, exponents, strict=True))


def fit_size(points: Sequence[TracePoint], values: Sequence[kernels.Size], form: SizeForm | None = None) -> Size:
    """The expression of sizes that are all numbers, or all arguments of one function; of the given form, if any.

    Raises:
        DoesNotFitError: when there is none.
    """
    first = values[0]
    if form is not None:
        function, rows = ("", [(v,) for v in values]) if isinstance(first, int) else (first[0], [v[1:] for v in values])  # type: ignore[index]
        if function != form.function:
            raise DoesNotFitError(f"{function!r} is not {form.function!r}")
        columns = zip(*rows, strict=True)
        return Size(function, tuple(_fit_form(points, c, e) for c, e in zip(columns, form.exponents, strict=True)))
    if isinstance(first, int):
        return Size("", (fit_poly(points, [v if isinstance(v, int) else -1 for v in values]),))
    if any(not isinstance(v, tuple) or v[0] != first[0] for v in values):
        raise DoesNotFitError(f"{values}")
    columns = zip(*(v[1:] for v in values if isinstance(v, tuple)), strict=True)
    return Size(first[0], tuple(fit_poly(points, column) for column in columns))
