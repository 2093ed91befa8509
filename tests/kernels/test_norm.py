"""The gradient norm, what follows from it, and the casts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.targets import all_targets, buffer, same_bits, using
from zeroplan_runtime import kernels
from zeroplan_runtime.kernels import FACTOR, NORM, SKIP, SQUARES, native_backend

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: fp32 accumulation over at most a few hundred terms a lane, then fp64, then one rounding to fp32.
NORM_TOLERANCE = 1e-6


def grad_of(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


@all_targets
def test_hand_case(target):
    """‖(3, 4)‖ = 5 at loss scale 2 is 2.5; clipped to 1 the factor is 1 / (2.5 + 1e-6) / 2."""
    with using(target) as device:
        scalars = torch.full((16,), 9.0, device=device)
        norm = kernels.grad_norm(torch.tensor([3.0, 4.0], device=device), scalars, max_norm=1.0, loss_scale=2.0)
        assert float(norm) == 2.5
        assert scalars[:4].tolist() == [25.0, 2.5, pytest.approx(0.2 / 1.0000004, rel=1e-7), 0.0]
        assert bool((scalars[4:] == 9.0).all())
        kernels.grad_norm([], scalars, max_norm=1.0, loss_scale=2.0, may_skip=True)
        assert scalars[:4].tolist() == [0.0, 0.0, 0.5, 0.0]


@all_targets
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_against_fp64_and_torch(target, dtype):
    with using(target) as device:
        scalars = torch.zeros(4, device=device)
        for n in (0, 1, 7, 8, 9, 63, 64, 65, 1023, 16385, 300007):
            for offset in (0, 1, 5):
                grad = grad_of(n, dtype)
                kernels.grad_norm(buffer(grad, device, offset), scalars, max_norm=1.0)
                want = float(grad.double().norm())
                assert float(scalars[NORM]) == pytest.approx(want, rel=NORM_TOLERANCE), f"n={n}, offset={offset}"
                leaf = torch.nn.Parameter(torch.zeros(n, dtype=torch.float64))
                leaf.grad = torch.ones(n, dtype=torch.float64) if n else torch.zeros(0, dtype=torch.float64)
                leaf.grad.copy_(grad.double())
                torch.nn.utils.clip_grad_norm_([leaf], 1.0)
                got = grad.double() * float(scalars[FACTOR])
                torch.testing.assert_close(got, leaf.grad, rtol=NORM_TOLERANCE, atol=1e-12)


@all_targets
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_overflow_is_seen_anywhere(target, dtype, value):
    n = 2051
    with using(target) as device:
        scalars = torch.zeros(4, device=device)
        for place in (0, 1, 7, 8, 1024, 2047, 2048, 2050):
            grad = torch.ones(n, dtype=dtype)
            grad[place] = value
            kernels.grad_norm(buffer(grad, device, 1), scalars, may_skip=True)
            assert float(scalars[SKIP]) == 1.0, f"missed at {place}"
            kernels.grad_norm(buffer(grad, device, 1), scalars, may_skip=False)
            assert float(scalars[SKIP]) == 0.0
            assert not math.isfinite(float(scalars[NORM]))
        kernels.grad_norm(torch.ones(n, dtype=dtype, device=device), scalars, may_skip=True)
        assert float(scalars[SKIP]) == 0.0


@all_targets
def test_several_buffers_and_ranks(target):
    """Buffers add up, and `reduce` adds the other ranks' sums before norm and factor follow."""
    grads = [grad_of(n, torch.bfloat16, n) for n in (5, 4096, 0, 77)]
    want = float(torch.cat(grads).double().norm())
    with using(target) as device:
        scalars = torch.zeros(16, device=device)
        here = [buffer(g, device, i) for i, g in enumerate(grads)]
        assert float(kernels.grad_norm(here, scalars)) == pytest.approx(want, rel=NORM_TOLERANCE)
        shapes = []

        def reduce(squares):
            shapes.append(squares.shape)
            squares *= 4  # three other ranks alike

        assert float(kernels.grad_norm(here, scalars, reduce=reduce)) == pytest.approx(2 * want, rel=NORM_TOLERANCE)
        assert shapes == [(1,)]
        # The workspace is as it was: the next call gives the same bits.
        first = scalars.clone()
        kernels.grad_norm(here, scalars, reduce=reduce)
        assert same_bits(first, scalars)


def test_native_sum_has_the_same_bits_everywhere():
    """Whatever the instruction set and the number of threads."""
    if native_backend.library() is None:
        pytest.skip("libzeroplan_cpu is not built")
    before, sums = torch.get_num_threads(), set()
    grad = grad_of(1_000_003, torch.bfloat16)
    try:
        for target in ("native-plain", "native-avx2", "native-avx512"):
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                try:
                    with using(target):
                        scalars = torch.zeros(4)
                        kernels.grad_norm(grad, scalars)
                        sums.add(float(scalars[SQUARES]))
                except pytest.skip.Exception:
                    continue
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1


@all_targets
def test_cast_of_every_16_bit_value(target):
    """All 65536 values of each 16-bit type, widened and brought back."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    with using(target) as device:
        for dtype in (torch.bfloat16, torch.float16):
            narrow = buffer(every.view(dtype), device)
            wide = kernels.cast(narrow, buffer(torch.zeros(65536), device))
            assert same_bits(wide, every.view(dtype).float())
            assert same_bits(kernels.cast(wide, torch.zeros_like(narrow)), narrow)


@all_targets
def test_cast_rounds_to_nearest_even(target):
    """Ties, neighbours of ties, the largest finite values, subnormals: as torch rounds."""
    base = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    with using(target) as device:
        for dtype in (torch.bfloat16, torch.float16):
            wide = base.view(dtype).float()
            next_up = torch.roll(wide, -1)
            middle = ((wide.double() + next_up.double()) / 2).float()
            for values in (middle, torch.nextafter(middle, wide), torch.nextafter(middle, next_up)):
                got = kernels.cast(buffer(values, device, 3), torch.zeros(65536, dtype=dtype, device=device))
                assert same_bits(got, values.to(dtype))


@all_targets
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("out", FLOATS, ids=str)
def test_cast_scales_between_all_types(target, source, out):
    values = grad_of(4099, source)
    with using(target) as device:
        for offset in (0, 1):
            place = buffer(torch.zeros(4099, dtype=out), device)
            got = kernels.cast(buffer(values, device, offset), place, scale=0.3)
            assert same_bits(got, (values.float() * 0.3).to(out))


@settings(max_examples=60)
@given(values=st.lists(st.floats(width=32), max_size=70), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_any_floats_round_as_torch_rounds(values, dtype):
    wide = torch.tensor(values, dtype=torch.float32)
    for target in ("native-plain", "native-avx2", "native-avx512", "torch"):
        try:
            with using(target):
                assert same_bits(kernels.cast(wide, torch.zeros(len(values), dtype=dtype)), wide.to(dtype))
        except pytest.skip.Exception:
            continue


def test_misfits_are_named():
    scalars = torch.zeros(4)
    with pytest.raises(ValueError, match="expected at least 4 contiguous fp32 scalars but got 2"):
        kernels.grad_norm(torch.zeros(3), scalars[:2])
    with pytest.raises(ValueError, match="expected a positive loss scale but got 0"):
        kernels.grad_norm(torch.zeros(3), scalars, loss_scale=0.0)
    with pytest.raises(ValueError, match=r"expected gradient of torch.float32 or .* but got torch.float64"):
        kernels.grad_norm(torch.zeros(3, dtype=torch.float64), scalars)
    with pytest.raises(ValueError, match="expected contiguous gradient on cpu but got strided"):
        kernels.grad_norm(torch.zeros(4, 4)[:, 1], scalars)
    with pytest.raises(ValueError, match="expected out of 3 elements but got 4"):
        kernels.cast(torch.zeros(3), torch.zeros(4))
