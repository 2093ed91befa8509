"""DeepSpeed's TiledMLP: the same blocks and the same gradients as ours, and what is planned of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.deepspeed.scripts import rows_of
from tests.engines.deepspeed.test_auto_tp import CONFIG
from zeroplan.core.errors import BadInput
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tapes import can_trace

CASES = [[1, 512, 4], [2, 500, 3], [2, 384, 1]]


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed and torch")
def test_our_tiles_are_deepspeeds(tmp_path: Path, warm_python: Path) -> None:
    rows = rows_of("run_tiled_mlp.py", CASES, tmp_path, warm_python)
    for row in rows:
        assert row["same"]
        assert len(row["theirs"]) > 20
        assert row["ours"] == row["theirs"]


def asked(**given: Any) -> Ask:
    return Ask(**{"model": CONFIG, "gpus": 2, "seq_len": 4096, "vram": "80G", "stage": 2, **given})


@pytest.mark.slow
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
def test_tiles_save_the_inner_tensors() -> None:
    """Of each block, gate, up, their activation and product go from the saved tensors: 4 · 704 channels of every token."""
    request = asked(offload_optimizer="none", offload_param="none")
    whole, tiled = (
        estimate_report(asked(offload_optimizer="none", offload_param="none", tiled_mlp=tiles)).plans[0].gpu for tiles in (0, 4)
    )
    inner = 4 * 4 * 704 * 4096 * 2
    assert "tiled_mlp" not in request
    assert whole.activations is not None
    assert tiled.activations is not None
    assert whole.activations - tiled.activations == pytest.approx(inner, rel=0.15)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tiled_mlp": -1}, "-1 is no number of tiles"),
        ({"tiled_mlp": 2, "engine": "fsdp2", "stage": 3}, "tiles are DeepSpeed's, and fsdp2 has none"),
        (
            {"tiled_mlp": 2, "gradient_checkpointing": True, "checkpoint_policy": "selective"},
            "selective checkpointing of tiles",
        ),
    ],
)
def test_what_is_not_modelled_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        estimate_report(asked(depth="formula", **given))


def test_a_plan_says_that_no_gpu_has_measured_it() -> None:
    warnings = estimate_report(asked(depth="formula", offload_optimizer="none", tiled_mlp=2)).warnings
    assert any("--tiled-mlp" in said and "not measured on a GPU" in said for said in warnings)


def test_stage_3_leaves_the_answer_open() -> None:
    (plan,) = estimate_report(asked(depth="formula", stage=3, offload_optimizer="none", tiled_mlp=2)).plans
    assert plan.fits is None
    assert "--tiled-mlp" in [one.key for one in plan.unmodelled]
