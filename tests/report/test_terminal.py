"""Lines that fit a terminal: text, tables and commands."""

from __future__ import annotations

import shlex
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.report.table import render
from zeroplan.report.terminal import PLAIN, Terminal

WORDS = st.lists(st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=12), min_size=1, max_size=40)


@given(WORDS, st.integers(20, 100))
def test_wrapped_text_fits_and_loses_nothing(words: list[str], width: int) -> None:
    lines = Terminal(width).wrap(" ".join(words), indent="note: ", hang="      ")
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines) == "note: " + " ".join(words)


def test_a_number_stays_with_its_unit() -> None:
    lines = Terminal(20).wrap("it needs as much as 16.9 GiB of memory, 29 % more")
    assert any("16.9 GiB" in line for line in lines)
    assert any("29 %" in line for line in lines)


def test_any_width_is_one_line() -> None:
    assert Terminal(None).wrap("word " * 100) == ["word " * 100]


@given(st.lists(st.tuples(WORDS.map(" ".join), WORDS.map(" ".join), st.integers(0, 10**9)), max_size=5), st.integers(40, 120))
def test_tables_fit_and_lose_nothing(rows: list[tuple[str, str, int]], width: int) -> None:
    cells = [[one, other, str(size)] for one, other, size in rows]
    text = render(["name", "what", "bytes"], cells, "plain", width=width)
    assert max(map(len, text.splitlines())) <= width
    letters = Counter("".join("".join(row) for row in cells)) - Counter("- ")
    found = Counter(text)
    assert all(found[letter] >= count for letter, count in letters.items())


def test_a_command_in_several_lines_is_one_command() -> None:
    words = [
        "zeroplan",
        "recommend",
        "my models/llama",
        "--seq-len",
        "4096",
        "--lora-targets",
        "q_proj,v_proj",
        "--trust-remote-code",
    ]
    lines = PLAIN.command("Next: ", words)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
    assert shlex.split("\n".join(lines).removeprefix("Next: ").replace("\\\n", " ")) == words
    assert not any(line.strip().removesuffix("\\").strip().endswith("--seq-len") for line in lines)


@pytest.mark.parametrize(
    "environment, shows, colour",
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False), ({}, False, False)],
)
def test_colour_needs_a_terminal_that_wants_it(
    environment: dict[str, str], shows: bool, colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: shows)
    assert Terminal.here().colour is colour


@pytest.mark.parametrize("columns, width", [("100", 100), ("20", 40), ("300", 120)])
def test_the_width_is_the_terminals_within_reason(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert Terminal.here().width == width
    assert Terminal.here(wide=True).width is None


def test_what_a_shell_computes_is_not_broken() -> None:
    start = "A=expandable:True OMP_NUM_THREADS=$(( ($(nproc) + 3) / 4 )) deepspeed --num_gpus 4 train.py --config run/x.json"
    lines = PLAIN.shell("  ", start)
    assert max(map(len, lines)) <= 80
    assert any("$(( ($(nproc) + 3) / 4 ))" in line for line in lines)
    assert " ".join("\n".join(lines).replace("\\\n", " ").split()) == start
