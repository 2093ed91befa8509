"""Messages in 8 bits become the values that they stand for, and factors turn: every byte, every rank's scale, every backend."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.targets import TARGETS
from zeroplan.core.arena.layout import FLOAT8_HEAD
from zeroplan_runtime.kernels import float8

DEVICES = ["torch", pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("torch-cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("count", [256, 8208])
def test_every_byte_and_scale(target: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path, device, _ = TARGETS[target]
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(float8, "backend", lambda _: path)
    scales = torch.tensor([2.0**-3, 1.0, 2.0**20])
    bits = (torch.arange(count) % 256).to(torch.uint8)
    messages = torch.zeros(3, FLOAT8_HEAD + count + 32, dtype=torch.uint8)
    messages[:, :4].view(torch.float32)[:, 0] = scales
    messages[:, FLOAT8_HEAD : FLOAT8_HEAD + count] = bits
    out = torch.empty(3 * count, dtype=torch.bfloat16, device=device)
    float8.widen_messages(messages.to(device), out)
    expected = bits.view(torch.float8_e4m3fn).float() * scales[:, None]
    assert torch.equal(out.cpu().nan_to_num(7.5), expected.view(-1).nan_to_num(7.5).bfloat16())
    assert int(out.isnan().sum()) == 3 * (2 * (count // 256) + max(0, count % 256 - 127))


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("shape", [(16, 16), (48, 208), (192, 64), (4096, 1040)])
def test_turned(target: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, device, _ = TARGETS[target]
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(float8, "backend", lambda _: path)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8)
    found = float8.turned(bits.view(torch.float8_e5m2).to(device))
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8).cpu(), bits.t())


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="cannot be turned"):
        float8.turned(torch.zeros(8, 16, dtype=torch.float8_e5m2))
    with pytest.raises(ValueError, match="do not hold"):
        float8.widen_messages(torch.zeros(2, 32, dtype=torch.uint8), torch.empty(64, dtype=torch.bfloat16))
