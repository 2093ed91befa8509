"""Head and loss in DeepSpeed's tiles: against DeepSpeed's function, and the plans."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.deepspeed.scripts import rows_of
from tests.engines.deepspeed.test_auto_tp import CONFIG
from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.timeline import Timeline
from zeroplan.tapes import can_trace

CASES = [[1, 512, 4], [2, 384, 3], [2, 384, 2]]
WORDS, TOKENS = 65_536, 4096
WORDY: dict[str, Any] = CONFIG | {"vocab_size": WORDS}
NEEDS_TRACING = pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed and torch")
def test_our_tiles_are_deepspeeds(tmp_path: Path, warm_python: Path) -> None:
    rows = rows_of("run_tiled_loss.py", CASES, tmp_path, warm_python)
    for row in rows:
        assert row["same"]
        assert len(row["theirs"]) > 10
        assert row["ours"] == row["theirs"]


def asked(**given: Any) -> Ask:
    plain = {"model": WORDY, "gpus": 2, "seq_len": TOKENS, "vram": "80G", "stage": 2, "offload_optimizer": "none"}
    return Ask(**plain | given)


def run_of(request: Ask) -> tuple[Case, Timeline]:
    from zeroplan.planner.tapes import ExpandedTapes

    (case,) = resolve(request).cases
    engine = find_engine("deepspeed")
    return case, engine.simulate(case, ExpandedTapes(engine).of(case)).timeline


@pytest.mark.slow
@NEEDS_TRACING
def test_the_logits_are_those_of_a_tile() -> None:
    """The whole loss has three tensors as large as the logits in fp32 at its peak, and eight tiles an eighth of each."""
    whole, tiled = (estimate_report(asked(tiled_loss=tiles)).plans[0].gpu for tiles in (0, 8))
    assert (whole.peak_phase, tiled.peak_phase) == ("backward", "forward")
    assert whole.activations is not None
    assert tiled.activations is not None
    assert whole.activations - tiled.activations == pytest.approx(7 / 8 * TOKENS * WORDS * 3 * 4, rel=0.01)


@pytest.mark.slow
@NEEDS_TRACING
def test_the_first_tiles_gradient_opens_the_bucket() -> None:
    """So it lies beside the logits of the other tiles, in the forward."""
    for tiles, opened in ((0, False), (8, True)):
        _, run = run_of(asked(tiled_loss=tiles, grad_accum=1))
        code, _, labels = run.recorded
        end = next(at.event for at, mark in zip(run.result.marks, run.marks, strict=True) if mark.name == "fwd")
        count = sum(word & ((1 << OP_BITS) - 1) == AllocatorOp.ALLOC for word in code[:end])
        made = {buffer for buffer, _ in labels.labels_of(range(count))}
        assert (Buffer.COMM_BUCKET in made) == opened


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tiled_loss": -1}, "-1 is no number of tiles"),
        ({"tiled_loss": 2, "engine": "fsdp2", "stage": 3}, "tiles are DeepSpeed's, and fsdp2 has none"),
        ({"tiled_loss": 2, "lora_rank": 8}, "a loss in tiles is not modelled beside it"),
        ({"tiled_loss": 2, "ulysses": 2}, "a loss in tiles is not modelled beside it"),
        ({"tiled_loss": 2, "model": CONFIG | {"tie_word_embeddings": True}}, "the head is tied to the embedding"),
    ],
)
def test_what_is_not_modelled_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        estimate_report(asked(depth="formula", **given))


def test_a_plan_says_what_is_not_known() -> None:
    report = estimate_report(asked(depth="formula", tiled_loss=2))
    assert not any("not measured" in said for said in report.warnings)
    (plan,) = estimate_report(asked(depth="formula", stage=3, tiled_loss=2)).plans
    assert plan.fits is None
    assert "--tiled-loss" in [one.key for one in plan.unmodelled]
