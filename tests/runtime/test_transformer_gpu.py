"""The fused transformer layer by its kernels: what a CPU computes, what flags keep beside the plan, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.test_transformer_layer import EVERY, batch, error, gradients, layer_of, reference
from zeroplan_runtime.kernels import backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU"),
]

#: Greatest error over a norm, by dtype: fp32 products may run in tf32.
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 3e-2}


def on_gpu(dtype: torch.dtype, **options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    hidden, seen = batch()
    return layer_of(**options).to("cuda", dtype), hidden.detach().to("cuda", dtype).requires_grad_(), seen.cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pre", [False, True])
def test_the_kernels_give_what_a_plain_reference_gives(pre: bool, dtype: torch.dtype) -> None:
    assert not backends.cuda_fault(0)
    for flags in EVERY:
        for fused in (True, False):
            layer, hidden, seen = on_gpu(dtype, pre_layer_norm=pre, fused_attention=fused, **flags)
            host, (given, mask) = layer_of(pre_layer_norm=pre), batch()
            expected = reference(host, given, mask, None)
            out = layer(hidden, seen)
            assert error(out.cpu(), expected) < TOLERANCE[dtype]
            for one, other in zip(gradients_on(out, hidden, layer), gradients(expected, given, host), strict=True):
                assert error(one.cpu(), other) < TOLERANCE[dtype]


def gradients_on(out: torch.Tensor, hidden: torch.Tensor, layer: Any) -> list[torch.Tensor]:
    """Gradients for the weights that :func:`gradients` draws on the host."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return list(torch.autograd.grad((out * weights).sum(), [hidden, *layer.parameters()]))


@pytest.mark.parametrize("pre", [False, True])
def test_flags_change_no_dropped_element(pre: bool) -> None:
    """With all scores, dropout is that of a CPU for the same seed, for every flag."""
    ratios = {"attn_dropout_ratio": 0.2, "hidden_dropout_ratio": 0.3, "pre_layer_norm": pre, "fused_attention": False}
    first: torch.Tensor | None = None
    for flags in EVERY:
        layer, hidden, seen = on_gpu(torch.float32, **ratios, **flags)
        torch.manual_seed(5)
        seed = int(torch.randint(2**63 - 1, (1,), device="cuda"))
        torch.manual_seed(5)
        out = layer(hidden, seen)
        first = out if first is None else first
        assert torch.equal(out, first)
        host, (given, mask) = layer_of(**ratios), batch()
        assert error(out.cpu(), reference(host, given, mask, seed)) < TOLERANCE[torch.float32]


def test_compiled_it_is_the_same_layer() -> None:
    torch._dynamo.reset()
    layer, hidden, seen = on_gpu(torch.bfloat16)
    eager = layer(hidden, seen)
    expected = gradients_on(eager, hidden, layer)
    out = torch.compile(layer, fullgraph=True)(hidden, seen)
    assert error(out, eager) < TOLERANCE[torch.bfloat16]
    for one, other in zip(gradients_on(out, hidden, layer), expected, strict=True):
        assert error(one, other) < TOLERANCE[torch.bfloat16]
