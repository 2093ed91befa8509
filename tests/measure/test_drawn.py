"""Configurations drawn at random: the draw repeats, and each has a figure that was said before it ran."""

import json
from pathlib import Path

import pytest

from benchmarks.measure.draw import Draw
from benchmarks.measure.spec import Spec
from benchmarks.predict_specs import row_to_be
from benchmarks.rows import request_of
from zeroplan.core.workload import OptimizerKind, Precision

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def drawn() -> list[Spec]:
    """Every configuration that was drawn and kept."""
    files = [_BENCHMARKS / "measure" / "specs" / f"drawn_{gpus}gpu.jsonl" for gpus in (1, 2)]
    return [Spec.from_dict(json.loads(line)) for path in files for line in path.read_text().splitlines()]


def test_one_seed_gives_one_draw() -> None:
    first, again = ([draw.spec(f"W{place}", 1) for place in range(20)] for draw in (Draw(7), Draw(7)))
    assert first == again
    assert first != [Draw(8).spec("W0", 1)] * 20


def test_what_was_drawn_is_what_the_seed_gives() -> None:
    """But for room and time, and the adapted layers of U25, whose names were wrong."""
    draw = Draw(20261123)
    made = {f"W{place + 1:02}": draw.spec(f"W{place + 1:02}", 1) for place in range(84)}
    made |= {f"U{place + 1:02}": draw.spec(f"U{place + 1:02}", 2) for place in range(28)}
    changed = ("gib", "limit")
    for spec in drawn():
        if spec.id != "U25":
            ours, theirs = ({k: v for k, v in one.to_dict().items() if k not in changed} for one in (spec, made[spec.id]))
            assert ours == theirs


def test_each_has_a_figure_and_a_request() -> None:
    said = {row["id"]: row for row in json.loads((_BENCHMARKS / "results" / "blind_random_predicted.json").read_text())}
    for spec in drawn():
        assert said[spec.id]["peak_allocated"] > 0
        assert request_of(row_to_be(spec, "NVIDIA H200")).engine == spec.engine


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"optimizer_type": "SGD", "optimizer": {"momentum": 0.9}}, "optimizer", "sgd_momentum"),
        ({"optimizer_type": "RMSprop"}, "optimizer_kind", OptimizerKind.FOREACH),
        ({"optimizer_type": "SGD"}, "optimizer_kind", OptimizerKind.FUSED),
        ({"precision": "pure"}, "precision", Precision.PURE),
        ({"lora_rank": 4, "lora_targets": ["all-linear"]}, "lora_targets", ()),
        ({"checkpointing": True, "reentrant": True}, "reentrant", True),
    ],
)
def test_what_a_spec_says_is_asked_for(changes: dict, field: str, value: object) -> None:
    spec = Spec.from_dict({"id": "t", "model": "tiny/llama", "engine": "ddp", **changes})
    assert request_of(row_to_be(spec, "NVIDIA H200")).value(field) == value


def test_a_section_of_the_config_stays_as_it_was_given() -> None:
    spec = Spec.from_dict({"id": "t", "model": "tiny/llama", "ds": {"bf16": {"enabled": True, "immediate_grad_update": True}}})
    assert request_of(row_to_be(spec, "NVIDIA H200")).ds_config["bf16"]["immediate_grad_update"] is True
