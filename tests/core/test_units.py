"""Sizes and counts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.units import GIB, format_bytes, format_count, parse_count, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24G", 24 * GIB), ("24GiB", 24 * GIB), ("24 gb", 24 * GIB), ("1.5T", 1536 * GIB), ("512m", GIB // 2), ("1024", 1024)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7.5B", 7_500_000_000),
        ("350M", 350_000_000),
        ("1T", 10**12),
        ("1,235,814,400", 1_235_814_400),
        ("1_000", 1000),
        ("2e9", 2 * 10**9),
    ],
)
def test_counts(text: str, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize("text", ["", " ", "G", "-1G", "0", "1e999", "nan", "inf", "24X", "24 G B", "1..5G", "٣G", "1G;rm"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(BadInput):
        parse_size(text, where="--vram")


@given(st.text(max_size=40))
def test_any_text_is_a_size_or_bad_input(text: str) -> None:
    try:
        assert parse_size(text) > 0
    except BadInput as error:
        assert str(error).isprintable()


@given(st.integers(1, 1 << 60))
def test_formats_stay_short(count: int) -> None:
    assert len(format_bytes(count)) < 16
    assert len(format_count(count)) < 16


def test_nearest_names() -> None:
    assert did_you_mean("adamq", ["adamw", "lion"]) == "did you mean 'adamw'?"
    assert did_you_mean("zzz", ["adamw"]) == ""
