"""The transformer layer's operations: published Philox vectors, fp64 autograd, odd shapes, and inverted norms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from zeroplan_runtime.kernels import backends, layer
from zeroplan_runtime.kernels.philox import Dropout, kept, philox

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Half a unit in the last place; a result is rounded once, and what is computed of rounded ones errs by a few.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
#: Error over a norm of what follows from a rounded output.
INVERTED = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(1, 8), (5, 24), (37, 1024), (3, 1048)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        assert torch.cuda.is_available()
        assert not backends.cuda_fault(0)
    return torch.device(request.param)


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def dropout_of(device: torch.device, ratio: float = 0.3, stream: int = 0, salt: int = -1) -> Dropout:
    return Dropout(ratio, torch.tensor([0x123456789ABCDEF], device=device), salt, stream)


def close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, units: float = 1.0) -> None:
    """Within `units` units of the greatest element: sums cancel, and what they are of is rounded."""
    exact = exact.detach()
    error = float((found.double() - exact.double()).abs().max())
    assert error <= 2.2 * units * UNIT[dtype] * max(1.0, float(exact.abs().max())), error


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: Any, key: Any, words: Any) -> None:
    """Known answers of Random123 (kat_vectors, philox4x32 10)."""
    found = philox(tuple(torch.tensor([one]) for one in counter), tuple(torch.tensor([one]) for one in key))
    assert tuple(int(word) for word in found) == words


def test_masks_differ_by_seed_salt_and_stream_and_have_their_share() -> None:
    device, shape = torch.device("cpu"), torch.Size([1000, 64])
    masks = [kept(one, shape) for one in (dropout_of(device), dropout_of(device, stream=1), dropout_of(device, salt=5))]
    masks.append(kept(Dropout(0.3, torch.tensor([7])), shape))
    count = shape.numel()
    for i, mask in enumerate(masks):
        assert abs(int((~mask).sum()) - 0.3 * count) < 5 * math.sqrt(0.21 * count)
        for other in masks[:i]:
            assert abs(int((mask & other).sum()) - 0.49 * count) < 5 * math.sqrt(0.25 * count)
    assert torch.equal(masks[0], kept(dropout_of(device), shape))
    assert kept(Dropout(0.0, torch.tensor([7])), shape).all()


def test_a_dropped_mean_stays() -> None:
    one = dropout_of(torch.device("cpu"))
    assert one.scale * (1 - one.threshold / 2**16) == 1.0
    x = torch.full((3, 5), 2.0)  # no multiple of eight elements
    out = layer.drop(x, one)
    assert torch.equal(out, torch.where(kept(one, x.shape), 2.0 * torch.tensor(one.scale), 0.0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_sum_and_its_norm_against_fp64(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Forward and backward, with and without dropout, of the input and of the output alone."""
    rows, columns = shape
    for ratio in (0.0, 0.3):
        made = [draw(*size, dtype=dtype, device=device, seed=i) for i, size in enumerate([shape, shape, shape])]
        vectors = [draw(columns, dtype=dtype, device=device, seed=9 + i) for i in range(3)]
        vectors[1] = (vectors[1].abs() + 0.5).to(dtype)  # a norm's weight, by which the inversion divides
        x, residual, grad = made
        bias, weight, shift = vectors
        dropout = dropout_of(device, ratio, stream=1) if ratio else None
        out, summed, mean, rstd = layer.add_norm(x.clone(), bias, residual, dropout, (weight, shift, 1e-5), keep=True)
        assert summed is not None
        leaves = [each.double().requires_grad_() for each in (x, bias, residual, weight, shift)]
        total = leaves[0] + leaves[1]
        if dropout is not None:
            total = torch.where(kept(dropout, total.shape), total * dropout.scale, 0.0)
        total = total + leaves[2]
        close(summed, total, dtype)
        # From here on the exact values of the sum as it is stored.
        rounded = total + (summed.double() - total).detach()
        exact = functional.layer_norm(rounded, (columns,), leaves[3], leaves[4], 1e-5)
        close(out, exact, dtype, 4.0)
        expected = torch.autograd.grad(exact, [leaves[2], leaves[3], leaves[4], leaves[0], leaves[1]], grad.double())
        units = 8.0 * max(1.0, math.sqrt(rows))
        found = layer.norm_backward(grad, summed, mean, rstd, weight, None, dropout=dropout)
        for one, other in zip(found, expected, strict=True):
            close(one, other, dtype, units)
        again, nothing, _, rstd = layer.add_norm(x.clone(), bias, residual, dropout, (weight, shift, 1e-5), keep=False)
        assert nothing is None
        assert torch.equal(again, out)
        inverted = layer.norm_backward(grad, out, None, rstd, weight, shift, dropout=dropout)
        for one, other in zip(inverted, expected, strict=True):
            assert float((one.double() - other).norm() / other.norm()) < INVERTED[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_use_of_the_sum_adds_its_gradient(device: torch.device, dtype: torch.dtype) -> None:
    x, grad, extra = (draw(6, 40, dtype=dtype, device=device, seed=i) for i in range(3))
    weight, shift = (draw(40, dtype=dtype, device=device, seed=3 + i) for i in range(2))
    out, mean, rstd = layer.norm(x, (weight, shift, 1e-12))
    leaf = x.double().requires_grad_()
    exact = functional.layer_norm(leaf, (40,), weight.double(), shift.double(), 1e-12)
    close(out, exact, dtype, 4.0)
    (expected,) = torch.autograd.grad(exact, leaf, grad.double())
    found, *_ = layer.norm_backward(grad, x, mean, rstd, weight, None, extra=extra, bias=False, out=grad)
    assert found.data_ptr() == grad.data_ptr()
    close(found, expected + extra.double(), dtype, 8.0)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_a_sum_without_a_norm(device: torch.device, ratio: float) -> None:
    x, residual, grad = (draw(9, 64, dtype=torch.float32, device=device, seed=i) for i in range(3))
    bias = draw(64, dtype=torch.float32, device=device, seed=4)
    dropout = dropout_of(device, ratio) if ratio else None
    mask = kept(dropout, x.shape) * dropout.scale if dropout is not None else torch.ones_like(x)
    out = layer.add(x.clone(), bias, residual, dropout)
    close(out, residual.double() + (x.double() + bias.double()) * mask.double(), torch.float32)
    grad_x, grad_bias = layer.add_backward(grad, dropout)
    assert (grad_x is grad) == (dropout is None)
    close(grad_x, grad.double() * mask.double(), torch.float32)
    close(grad_bias, (grad.double() * mask.double()).sum(0), torch.float32, 4.0)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (11, 4096), (5, 2056)])
def test_gelu_against_fp64(device: torch.device, dtype: torch.dtype, shape: tuple[int, int], approximate: str) -> None:
    x, grad = (draw(*shape, dtype=dtype, device=device, seed=i) for i in range(2))
    bias = draw(shape[1], dtype=dtype, device=device, seed=2)
    leaves = [x.double().requires_grad_(), bias.double().requires_grad_()]
    exact = functional.gelu(leaves[0] + leaves[1], approximate=approximate)
    close(layer.bias_gelu(x, bias, approximate), exact, dtype, 2.0)
    expected = torch.autograd.grad(exact, leaves, grad.double())
    grad_bias = layer.bias_gelu_backward(grad, x, bias, approximate)
    factor = 8.0 if approximate == "tanh" else 4.0  # tanhf errs by two units in the last place, which 1 - tanh² makes more of
    close(grad, expected[0], dtype, factor)
    close(grad_bias, expected[1], dtype, factor * math.sqrt(shape[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_drops_what_a_cpu_drops(dtype: torch.dtype) -> None:
    """The same elements for the same seed, in every kernel that drops."""
    host, gpu = torch.device("cpu"), torch.device("cuda")
    ones = torch.ones(7, 1032, dtype=dtype)
    bias, residual = torch.zeros(1032, dtype=dtype), torch.zeros_like(ones)
    found = [layer.drop(ones.to(each), dropout_of(each)) for each in (host, gpu)]
    assert torch.equal(found[0], found[1].cpu())
    sums = [layer.add(ones.clone().to(each), bias.to(each), residual.to(each), dropout_of(each)) for each in (host, gpu)]
    grads = [layer.add_backward(ones.to(each), dropout_of(each))[0] for each in (host, gpu)]
    for one, other in (sums, grads):
        assert torch.equal(one, found[0])
        assert torch.equal(other.cpu(), found[0])
