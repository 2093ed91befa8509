"""A seeded sample of the sweep over transformers' classes comes out as the stored results say."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.sweep_models import RESULT, TABLES, Outcome, counts_of, read, sweep_one, write

#: Small classes, whose traces take about a second each.
_QUICK = ("token-classification", "sequence-classification")


def test_the_stored_sweep_is_whole_and_no_refusal_is_silent() -> None:
    found = read(RESULT)
    assert set(counts_of(found)) == set(TABLES)
    assert [one.architecture for one in found if one.outcome == "refused" and not one.why] == []
    assert sum(one.outcome == "traced" for one in found) >= 585


def test_a_sample_of_it_comes_out_alike() -> None:
    found = [one for one in read(RESULT) if one.task in _QUICK and "more than" not in one.why]
    for one in random.Random(4).sample(found, 2):
        again = sweep_one(one.task, one.model_type, one.architecture, seconds=600)
        assert (again.architecture, again.outcome) == (one.architecture, one.outcome)


def test_a_head_without_a_loss_is_refused_by_name() -> None:
    one = sweep_one("image-classification", "pp_lcnet", "PPLCNetForImageClassification", seconds=600)
    assert (one.outcome, "no loss" in one.why) == ("refused", True)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    rows = [Outcome("ctc", "a", "AForCTC", "traced"), Outcome("ctc", "b", "BForCTC", "refused", "why")]
    write(tmp_path / "sweep.json", rows)
    assert read(tmp_path / "sweep.json") == rows
    assert counts_of(rows) == {"ctc": {"traced": 1, "refused": 1}}


@pytest.mark.parametrize(
    ("campaign", "letter", "seed", "refused_since"),
    [("classes", "K", 20261124, {"LongformerForSequenceClassification"}), ("classes2", "Z", 20261128, set())],
)
def test_the_drawn_classes_are_the_first_of_their_seed(campaign: str, letter: str, seed: int, refused_since: set[str]) -> None:
    """Forty, those that are too large among them, each with its prediction or its reason."""
    names = sorted({one.architecture for one in read(RESULT) if one.outcome == "traced"} | refused_since)
    random.Random(seed).shuffle(names)
    specs = RESULT.parents[1] / "measure" / "specs"
    lines = [json.loads(line) for file in sorted(specs.glob(f"{campaign}_1gpu*")) for line in file.read_text().splitlines()]
    drawn = {line["id"]: line["model"].removeprefix("class/") for line in lines}
    assert drawn == {f"{letter}{place:02}": name for place, name in enumerate(names[:40], start=1)}
    predicted = {one["id"] for one in json.loads((RESULT.parent / f"blind_{campaign}_predicted.json").read_text())}
    assert all((line["id"] in predicted) != bool(line.get("skipped")) for line in lines)
