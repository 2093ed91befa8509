"""Derived integers equal plain ones and keep their expression."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.ledger.derive import Derived, expression, fraction, pow2, shard

COUNT = st.integers(0, 1 << 45)
PARTS = st.integers(1, 4096)


def test_an_expression_reads_as_a_formula() -> None:
    params, ranks = Derived(7_500_000_000, "params"), Derived(64, "ranks")
    value = 2 * params + 12 * shard(params, ranks)
    assert expression(value) == "2 × params + 12 × ⌈params / ranks⌉"
    assert int(value) == 15_000_000_000 + 12 * 117_187_500


def test_brackets_are_kept_where_they_are_needed() -> None:
    a, b = Derived(2, "a"), Derived(3, "b")
    assert expression((a + b) * 4) == "(a + b) × 4"
    assert expression(10 - (a + b)) == "10 − (a + b)"
    assert expression(shard(a + b, b)) == "⌈(a + b) / b⌉"


def test_ones_and_zeros_leave_no_trace() -> None:
    a = Derived(5, "a")
    assert expression(a * 1) == "a"
    assert expression(0 + a) == "a"
    assert expression(sum([a, a])) == "a + a"


@given(COUNT, PARTS)
def test_helpers_give_the_same_number_with_and_without_a_derivation(count: int, parts: int) -> None:
    a, n = Derived(count, "a"), Derived(parts, "n")
    for plain, derived in (
        (shard(count, parts), shard(a, n)),
        (pow2(count), pow2(a)),
        (fraction(count, 8, 256), fraction(a, 8, 256)),
    ):
        assert int(derived) == plain
        assert isinstance(derived, Derived)


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (3, 4), (4, 4), (5, 8), (1 << 33, 1 << 33)])
def test_pow2_by_hand(count: int, expected: int) -> None:
    assert pow2(count) == expected


@given(COUNT, PARTS)
def test_shards_cover_the_whole_and_waste_less_than_one_each(count: int, parts: int) -> None:
    assert 0 <= shard(count, parts) * parts - count < parts
