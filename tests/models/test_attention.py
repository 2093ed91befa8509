"""Models that transformers runs with eager attention alone."""

from __future__ import annotations

import pytest

from zeroplan.models.attention import EAGER_ONLY
from zeroplan.planner.estimate import estimate_runs
from zeroplan.run.ask import Ask


def plan_of(model: str, attn: str) -> tuple[tuple[str, ...], int | None]:
    request = Ask(model=model, attn=attn, stage=2, offload_optimizer="none", gpu="H100", seq_len=512)
    found = estimate_runs(request)
    (run,) = found.runs
    assert run is not None
    return found.report.warnings, run.plan.gpu.peak_reserved


@pytest.mark.parametrize("model", ["bigscience/bloom-560m", "microsoft/deberta-v3-large"])
def test_sdpa_is_planned_as_eager_and_said_so(model: str) -> None:
    warnings, reserved = plan_of(model, "sdpa")
    assert any("planned with eager" in warning for warning in warnings)
    eager_warnings, eager_reserved = plan_of(model, "eager")
    assert not any("planned with eager" in warning for warning in eager_warnings)
    assert reserved == eager_reserved


def test_a_model_with_sdpa_has_no_warning() -> None:
    warnings, _ = plan_of("meta-llama/Llama-3.2-1B", "sdpa")
    assert not any("planned with eager" in warning for warning in warnings)


@pytest.mark.torch
@pytest.mark.parametrize("model_type", ["bloom", "gptj", "deberta-v2", "llama", "gpt2", "bert"])
def test_table_agrees_with_transformers(model_type: str) -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, auto.MODEL_MAPPING_NAMES[model_type])
    assert (model_type in EAGER_ONLY) is not model._supports_sdpa
