"""Any module with an example batch is planned from a trace of both."""

from __future__ import annotations

from typing import Any

import pytest

import zeroplan
from zeroplan.core.errors import BadInput

pytestmark = pytest.mark.torch


def _module() -> Any:
    import torch

    class Widening(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(256, 4096), torch.nn.Linear(4096, 256)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            made: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
            return made.float().pow(2).mean() * scale

    return Widening()


def test_an_example_batch_decides_activations_and_fit() -> None:
    """By hand: fp32 states of 4 + 8 bytes an element and gradients, and GELU's input and output for 64 × 512 rows."""
    import torch

    module = _module()
    before = {name: p.clone() for name, p in module.named_parameters()}
    asked = {"engine": "ddp", "dtype": "fp32", "gpu": "H100"}
    (plan,) = zeroplan.estimate(module, inputs=torch.empty(64, 512, 256), **asked)
    wide = 64 * 512 * 4096 * 4
    states = 12 * sum(p.numel() for p in module.parameters())
    assert plan.fits is True
    assert plan.gpu.activations is not None
    assert 2 * wide <= plan.gpu.activations <= 4 * wide
    assert plan.gpu.peak_allocated == pytest.approx(plan.gpu.activations + states, rel=0.1)
    (half,) = zeroplan.estimate(module, inputs={"x": torch.empty(32, 512, 256), "scale": 2.0}, **asked)
    assert half.gpu.activations == pytest.approx(plan.gpu.activations / 2, rel=0.05)
    assert all(torch.equal(p, before[name]) and p.device.type == "cpu" for name, p in module.named_parameters())


def test_without_a_batch_nothing_is_said_to_fit() -> None:
    plans = zeroplan.estimate(_module(), engine="ddp", gpu="H100")
    assert plans[0].fits is None
    assert any("give" in warning or "no architecture" in warning for warning in plans.report.warnings)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "openai-community/gpt2"}, "example batch for a live module"),
        ({"micro_batch": 3}, "3 differs from the inputs' 2"),
        ({"lora_rank": 8}, "as it is"),
        ({"inputs": {"scale": 1.0}}, "no tensor in the batch"),
    ],
)
def test_what_an_example_cannot_say(changes: dict[str, Any], says: str) -> None:
    import torch

    asked = {"model": _module(), "inputs": torch.empty(2, 4, 256), "engine": "ddp", **changes}
    with pytest.raises(BadInput, match=says):
        zeroplan.estimate(**asked)


@pytest.mark.parametrize(
    ("engine", "stage", "width"), [("deepspeed", 2, 2), ("zeroplan", 2, 2), ("fsdp2", 3, 4), ("ddp", 0, 4)]
)
def test_registered_buffers_lie_whole_on_every_rank(engine: str, stage: int, width: int) -> None:
    """One that two modules hold counts once; ddp's are fp32 under autocast, and FSDP 2 leaves them as they are."""
    import torch

    rows, x = 1 << 20, torch.empty(8, 16, 256)
    asked: dict[str, Any] = {"engine": engine, "gpu": "H100", "stage": stage, "gpus": 2}
    plain = zeroplan.estimate(_module(), inputs=x, **asked)[0]
    module = _module()
    module.register_buffer("table", torch.empty(rows, 64))
    module.up.register_buffer("table", module.table)
    held = zeroplan.estimate(module, inputs=x, **asked)[0]
    assert held.gpu.peak_allocated - plain.gpu.peak_allocated >= rows * 64 * width
    assert {line.bytes for line in held.lines if line.buffer == "model.buffer"} == {rows * 64 * width}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gradient_checkpointing": "no"}, "gradient_checkpointing: 'no' is neither True nor False"),
        ({"gpus": "4"}, "gpus: '4' is no whole number"),
        ({"micro_batch": 2.0}, "micro_batch: 2.0 is no whole number"),
        ({"stage": True}, "stage: True is no whole number"),
        ({"optimizer": dict}, "optimizer: <class 'dict'> is no name"),
        ({"engine": 3}, "engine: 3 is no name"),
        ({"ds_config": []}, "ds_config: a list is no ds_config"),
    ],
)
def test_arguments_of_another_type_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as error:
        zeroplan.estimate("openai-community/gpt2", depth="formula", **fields)
    assert said in str(error.value)


def test_dtypes_of_torch_and_numbers_of_numpy_are_understood() -> None:
    import numpy as np
    import torch

    (plan,) = zeroplan.estimate(
        "openai-community/gpt2", depth="formula", stage=np.int64(2), dtype=torch.float16, gpus=np.int32(2)
    )
    assert plan.stage == 2
    assert (
        zeroplan.estimate(None, params=7.5e9)[0].gpu.model_states
        == zeroplan.estimate(None, params=7_500_000_000)[0].gpu.model_states
    )


def test_what_is_no_module_yet_is_refused() -> None:
    import torch

    class NoInit(torch.nn.Module):
        def __init__(self) -> None:
            pass

    for wrong in (NoInit(), torch.nn.Linear):
        with pytest.raises(BadInput, match=r"super\(\).__init__|is no model"):
            zeroplan.estimate(wrong)
