"""Sizes and counts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.sizes import GIB, format_bytes, format_count, parse_count, parse_size, parse_tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24G", 24 * GIB),
        ("24GiB", 24 * GIB),
        ("24 gb", 24 * GIB),
        ("1.5T", 1536 * GIB),
        ("512m", GIB // 2),
        ("80", 80 * GIB),
        ("1.5", 1536 * 2**20),
        ("10,000", 10_000 * GIB),
        (24, 24 * GIB),
        ("85899345920", 80 * GIB),
        (2**20, 2**20),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["24576", "10001", 1_048_575])
def test_a_bare_number_that_could_be_mib_is_refused(text: str | int) -> None:
    with pytest.raises(BadInput, match=f"--vram: {text} has no unit; write {text}M if it is MiB"):
        parse_size(text, where="--vram")


@pytest.mark.parametrize(("text", "expected"), [("4096", 4096), ("4k", 4096), ("128K", 131072), ("4,096", 4096), (7, 7)])
def test_tokens(text: str | int, expected: int) -> None:
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["", "k", "0", "-4k", "4.5k", "4g", "1e3", "9" * 30])
def test_no_tokens(text: str) -> None:
    with pytest.raises(BadInput, match="--seq-len"):
        parse_tokens(text, where="--seq-len")


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


def test_a_part_of_a_gib_is_a_size() -> None:
    assert parse_size("0.5") == parse_size("512M") == parse_size(".5")
    with pytest.raises(BadInput, match="above zero"):
        parse_size("0.0")
