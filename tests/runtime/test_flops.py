"""The ds_config's ``flops_profiler`` counts what a step computes, against counts by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.train import ds_config
from zeroplan_runtime.monitors.flops import FlopsProfile, FlopsProfiler

STEPS, MICRO = 4, 2


def train(remat: str = "", stage: int = 2, **section: Any) -> tuple[list[float], FlopsProfile | None]:
    """The losses of a few steps, and what was profiled."""
    config = ds_config(stage, "fp32", gradient_accumulation_steps=MICRO, flops_profiler=section)
    engine, *_ = zeroplan_runtime.initialize(model=models.make(remat=remat), config=config, device="cpu")
    losses = []
    for step in range(STEPS):
        for micro in range(MICRO):
            losses.append(engine.backward(engine(models.batch(step, micro, 0))).item())
            engine.step()
    profiler = engine.flops_profiler
    engine.destroy()
    return losses, profiler and profiler.profile


def products(tokens: int) -> tuple[int, int]:
    """FLOPs of one forward: of the linear layers, and of attention (one head as wide as the model)."""
    width, hidden = models.WIDTH, [31 + 5 * (i % 2) for i in range(5)]
    linear = sum(2 * tokens * width * (3 * width + 2 * h) for h in hidden) + 2 * tokens * width * models.VOCAB
    return linear, 5 * 2 * (2 * tokens * models.LENGTH * width)


@pytest.mark.parametrize(("remat", "stage"), [("", 2), ("reentrant", 3), ("plain", 3)])
def test_a_step_is_counted_as_by_hand(remat: str, stage: int) -> None:
    tokens = models.BATCH * models.LENGTH
    linear, attention = products(tokens)
    losses, profile = train(remat, stage, enabled=True)
    assert losses == train(remat, stage)[0]
    assert profile is not None
    assert profile.seconds is not None
    assert profile.forward == MICRO * (linear + attention)
    assert profile.backward == 2 * profile.forward  # each product has two in the backward
    in_blocks = linear - 2 * tokens * models.WIDTH * models.VOCAB + attention
    assert profile.recomputed == (MICRO * in_blocks if remat else 0)


def test_a_flash_kernel_computes_its_scores_again() -> None:
    """The CPU's attention of [batch, heads, length, width] inputs is one operator, which torch's own table lacks."""
    profiler = FlopsProfiler({}, torch.device("cpu"), None)
    query = torch.randn(2, 3, 5, 4, requires_grad=True)
    with profiler.counting(1, backward=False):
        output = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    with profiler.counting(1, backward=True):
        output.sum().backward()
    profiler.stepped(2)
    product = 2 * 2 * 3 * 5 * 5 * 4
    assert profiler.profile == FlopsProfile(forward=2 * product, backward=5 * product, recomputed=0)


def test_it_is_said_once_in_a_file_and_says_what_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "flops.txt"
    _, profile = train(enabled=True, profile_step=0, output_file=str(path))
    assert path.read_text() == f"{profile}\n"
    assert "MFU unknown" in path.read_text()


def test_mfu_leaves_out_what_was_recomputed() -> None:
    profile = FlopsProfile(forward=10**14, backward=2 * 10**14, recomputed=10**14, seconds=1.0, peak_tflops=1000.0)
    assert (profile.mfu, profile.hfu) == (pytest.approx(0.3), pytest.approx(0.4))
    assert "MFU 30.0%, HFU 40.0% of 1000 TFLOP/s" in str(profile)


def test_off_and_unreached_steps_profile_nothing() -> None:
    assert train()[1] is None
    assert train(enabled=True, profile_step=STEPS)[1] is None
