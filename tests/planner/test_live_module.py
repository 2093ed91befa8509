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
