"""Batches of different lengths: the longest decides what is allocated, their changes what is reserved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.lengths import BATCHES, padded_batches, read_lengths, sampled
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

REQUEST = Ask(model="openai-community/gpt2", engine="ddp", gpus=2, vram="80G", micro_batch=4)


def test_files_and_pairs_of_numbers_are_read(tmp_path: Path) -> None:
    lines, listed = tmp_path / "lengths.txt", tmp_path / "lengths.json"
    lines.write_text("30\n10\n20\n")
    listed.write_text(json.dumps([30, 10, 20]))
    assert read_lengths(str(lines)) == read_lengths(str(listed)) == (10, 20, 30)
    spread = read_lengths("400,4096")
    assert max(spread) == 4096
    assert abs(sum(spread) / len(spread) - 400) < 8
    assert set(read_lengths("512,512")) >= {512}
    assert max(read_lengths("512,512")) == 512
    many = sampled(range(1, 100_001))
    assert len(many) == 1000
    assert many[-1] == 100_000
    assert abs(sum(many) / len(many) - 50_000) < 200


@pytest.mark.parametrize("content", ["", "[]", "[1.5]", "[true]", "ten", "0", "[-3]", "{}", "[" * 100_000])
def test_what_holds_no_lengths_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text(content)
    with pytest.raises(BadInput, match="--lengths"):
        read_lengths(str(file))
    for text in ("4096,512", "0,9", str(tmp_path / "nowhere")):
        with pytest.raises(BadInput, match="--lengths"):
            read_lengths(text)


def test_batches_are_drawn_alike_each_time_and_the_longest_comes_last() -> None:
    lengths = sampled(range(1, 501))
    batches = padded_batches(lengths, 4)
    assert batches == padded_batches(lengths, 4)
    assert len(batches) == BATCHES + 1
    assert batches[-1] == 500
    assert sum(padded_batches(lengths, 16)) > sum(batches) > sum(padded_batches(lengths, 1))
    assert max(padded_batches(lengths, 4, cut=300)) == 300


def test_reserved_grows_with_the_changes_and_allocated_does_not() -> None:
    alike = estimate_report(REQUEST.replace(seq_len=1024)).plans[0].gpu
    changing = estimate_report(REQUEST.replace(lengths="300,1024"))
    found = changing.plans[0].gpu
    assert changing.workload["seq_len"] == 1024
    assert abs(found.peak_allocated - alike.peak_allocated) < 0.01 * alike.peak_allocated
    assert found.peak_reserved > 1.2 * alike.peak_reserved
    segments = estimate_report(REQUEST.replace(lengths="300,1024", alloc_conf="expandable_segments:True")).plans[0].gpu
    assert segments.peak_reserved < 1.1 * alike.peak_reserved
    one = estimate_report(REQUEST.replace(lengths=[1024] * 3)).plans[0].gpu
    assert (one.peak_allocated, one.peak_reserved) == (alike.peak_allocated, alike.peak_reserved)


def test_an_engine_without_them_leaves_the_answer_open() -> None:
    plan = estimate_report(REQUEST.replace(engine="zeroplan", stage=2, lengths=[100, 1024])).plans[0]
    assert plan.fits is None
    assert [one.key for one in plan.unmodelled] == ["lengths"]
