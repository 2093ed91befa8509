"""Layers of torch itself, traced on the meta device with the kernels that they run on a GPU."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attention_layers_run_fused_kernels(dtype: str) -> None:
    """The memory-efficient kernel takes fp32 and a padding mask, so no scores are kept: memory is linear in the length.
    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    import torch
    from torch import nn

    import zeroplan

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.layer(x, src_key_padding_mask=padding).sum()  # type: ignore[no-any-return]

    def kept(length: int) -> int:
        inputs = {"x": torch.randn(4, length, 32), "padding": torch.zeros(4, length, dtype=torch.bool)}
        (plan,) = zeroplan.estimate(Layer(), inputs=inputs, engine="ddp", dtype=dtype, vram="24G")
        assert plan.gpu.activations is not None
        return plan.gpu.activations

    one, two, four = map(kept, (256, 512, 1024))
    assert four - two == pytest.approx(2 * (two - one), rel=0.02)
