"""Each update: an exact hand case, the fp64 reference within a table of tolerances, and equal bits on every backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels import formulas
from tests.kernels.targets import all_targets, buffer, same_bits, using
from zeroplan_runtime import kernels
from zeroplan_runtime.kernels import native_backend

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OUTS = (None, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 8, 9, 255, 1023, 4097, 70001)
#: Largest error of a result that was computed in fp32 from the same inputs, relative to the values' scale (1 in these tests):
#: a handful of roundings of 2^-24. The gradient's own rounding is no error: the reference reads the rounded gradient.
FP32_TOLERANCE = 1e-6
#: The written parameter is the fp32 one rounded once: half the spacing of 8 or 11 significant bits, relative.
OUT_TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def names(kind: str) -> int:
    return {"adamw": 2, "adam": 2, "lion": 1, "sgd": 1, "lamb": 2}[kind]


HYPER = {
    "adamw": {"lr": 1e-2, "step": 3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "adam": {"lr": 1e-2, "step": 3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "lion": {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "step": 2, "momentum": 0.9, "dampening": 0.1, "nesterov": True, "weight_decay": 0.1},
    "lamb": {"lr": 1e-2, "step": 3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1},
}


def inputs(n: int, grad: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Parameter, gradient, first and second state of scale one."""
    make = torch.Generator().manual_seed(seed)
    p, g, m, v = (torch.randn(n, generator=make) for _ in range(4))
    return [p, g.to(grad), m, v.abs()]


def apply(kind, device, tensors, out=None, scalars=None, offset=0, bounds=None, **hyper):
    """Runs one update on copies; returns [p, states…, out] on the CPU."""
    p, g, *states = (buffer(t, device, offset) for t in tensors[: 2 + names(kind)])
    written = None if out is None else buffer(torch.full((p.numel(),), 7.0, dtype=out), device, offset)
    more = [kernels.make_segments(bounds or [0, p.numel()], device)] if kind == "lamb" else []
    scalars = None if scalars is None else scalars.to(device)
    hyper = {**HYPER[kind], **hyper, **({"decoupled": False} if kind == "adam" else {})}
    update = kernels.adamw if kind == "adam" else getattr(kernels, kind)
    update(p, g, *states, *more, param_out=written, scalars=scalars, **hyper)
    return [t.cpu() for t in (p, *states, *([] if written is None else [written]))]


@all_targets
def test_hand_cases(target):
    """Values that fp32 holds exactly, worked out by hand."""

    def one(x: float) -> torch.Tensor:
        return torch.tensor([x])

    with using(target) as device:
        # m = 0.5·0 + 0.5·2 = 1, v = 0.75·0 + 0.25·4 = 1, √v/√(1−0.75) = 2, η/(1−0.5) = 1: p = (1 − 0.5·0.5)·1 − 1·1/2
        exact = {"lr": 0.5, "step": 1, "betas": (0.5, 0.75), "eps": 0.0, "weight_decay": 0.5}
        start = [one(1.0), one(2.0), one(0.0), one(0.0)]
        p, m, v, out = apply("adamw", device, start, torch.bfloat16, **exact)
        assert (p, m, v, out) == (0.25, 1.0, 1.0, 0.25)
        # g = 1.5 + 0.5·1 = 2, then as above without decay: p = 1 − 1/2
        p, m, v = apply("adam", device, [one(1.0), one(1.5), one(0.0), one(0.0)], **exact)
        assert (p, m, v) == (0.5, 1.0, 1.0)
        # sign(0.5·(−1) + 0.5·2) = 1: p = (1 − 0.25)·1 − 0.5; m = 0.75·(−1) + 0.25·2
        p, m = apply("lion", device, [one(1.0), one(2.0), one(-1.0)], lr=0.5, betas=(0.5, 0.75), weight_decay=0.5)
        assert (p, m) == (0.25, -0.25)
        # g = 2 + 0.5·1 = 2.5, b = 0.5·4 + 0.5·2.5 = 3.25: p = 1 − 0.5·(2.5 + 0.5·3.25)
        sgd = {"lr": 0.5, "step": 2, "momentum": 0.5, "dampening": 0.5, "weight_decay": 0.5}
        p, b = apply("sgd", device, [one(1.0), one(2.0), one(4.0)], nesterov=True, **sgd)
        assert (p, b) == (-1.0625, 3.25)
        # m = 1, v = 1, u = 1/1 + 0.5·1 = 1.5, ‖p‖/‖u‖ = 2/3, η·√0.25/0.5 = 0.5: p = 1 − 0.5·2/3·1.5
        p, m, v = apply("lamb", device, start, **exact)
        assert (m, v) == (1.0, 1.0)
        assert float(p) == pytest.approx(0.5, abs=2**-24)


@all_targets
@pytest.mark.parametrize("kind", HYPER)
@pytest.mark.parametrize("grad", FLOATS, ids=str)
@pytest.mark.parametrize("out", OUTS, ids=str)
def test_against_fp64(target, kind, grad, out):
    with using(target) as device:
        for n in SIZES:
            tensors = inputs(n, grad)
            scalars = torch.tensor([0.0, 0.0, 0.37, 0.0])
            bounds = sorted({0, min(5, n), n // 3, n}) if kind == "lamb" else None
            got = apply(kind, device, tensors, out, scalars, bounds=bounds)
            p, g, *states = (t.double() for t in tensors[: 2 + names(kind)])
            formula = formulas.adam if kind in ("adam", "adamw") else getattr(formulas, kind)
            more = {"decoupled": kind == "adamw"} if formula is formulas.adam else {}
            places = [bounds] if kind == "lamb" else []
            want = formula(p, g * scalars[2].double(), *states, *places, **HYPER[kind], **more)
            for a, b in zip(got, want, strict=False):
                drift = float((a.double() - b).abs().max()) if n else 0.0
                assert drift <= FP32_TOLERANCE * max(1.0, float(b.abs().max()) if n else 0.0), f"n={n}: off by {drift:.2e}"
            if out is not None:
                assert same_bits(got[-1], got[0].to(out))
                torch.testing.assert_close(got[-1].double(), want[0], rtol=OUT_TOLERANCE[out], atol=4 * FP32_TOLERANCE)


@all_targets
@pytest.mark.parametrize("kind", HYPER)
def test_bits_equal_those_of_the_torch_path(target, kind):
    """Special values among ordinary ones, every alignment: 0, −0, subnormals, infinities, NaN, the largest and smallest."""
    special = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-8, 65504.0]
    )
    n = 1039
    for grad, out in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, None)):
        tensors = inputs(n, grad)
        if kind != "lamb":  # a NaN in a segment's norm leaves nothing to compare
            for i, tensor in enumerate(tensors):
                places = torch.randperm(n, generator=torch.Generator().manual_seed(i))[: 6 * len(special)]
                tensor[places] = special.repeat(6).to(tensor.dtype)
            tensors[3].abs_()
        scalars = torch.tensor([0.0, 0.0, 0.75, 0.0])
        with using("torch") as device:
            want = apply(kind, device, tensors, out, scalars)
        with using(target) as device:
            for offset in (0, 1, 2, 3, 4, 5, 8, 13):
                got = apply(kind, device, tensors, out, scalars, offset=offset)
                for i, (a, b) in enumerate(zip(got, want, strict=True)):
                    if kind == "lamb" and i in (0, 3):  # its rate follows from sums, which backends add in other orders
                        torch.testing.assert_close(a, b, rtol=1e-2 if i else 1e-6, atol=1e-6)
                    else:
                        different = (a != b) & ~(a.isnan() & b.isnan())
                        assert same_bits(a, b), f"offset {offset}, tensor {i}: {a[different][:4]} is not {b[different][:4]}"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(0, 3000), offset=st.integers(0, 17), kind=st.sampled_from(["adamw", "lion", "sgd"]), seed=st.integers(0, 9)
)
def test_any_size_and_alignment(n, offset, kind, seed):
    """The native routines write every element, none beside, and the bits of the torch path."""
    if native_backend.library() is None:
        pytest.skip("libzeroplan_cpu is not built")
    tensors = inputs(n, torch.bfloat16, seed)
    with using("torch") as device:
        want = apply(kind, device, tensors, torch.float16)
    for target in ("native-plain", "native-avx2", "native-avx512"):
        try:
            with using(target) as device:
                room = torch.full((n + 64,), 3.0)
                inside = room[offset : offset + n]
                inside.copy_(tensors[0])
                got = apply(kind, device, [inside, *tensors[1:]], torch.float16, offset=offset)
        except pytest.skip.Exception:
            continue
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@all_targets
@pytest.mark.parametrize("kind", HYPER)
def test_skip_leaves_everything(target, kind):
    tensors = inputs(100, torch.bfloat16)
    with using(target) as device:
        got = apply(kind, device, tensors, torch.bfloat16, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    *kept, out = got
    for a, b in zip(kept, [tensors[0], *tensors[2:]], strict=False):
        assert same_bits(a, b)
    assert bool((out == 7.0).all())


@all_targets
def test_neighbours_are_left_alone(target):
    """A view in the middle of a larger buffer: what lies around it keeps its bits."""
    with using(target) as device:
        for n, first in ((1, 3), (5, 1), (33, 7), (1000, 2)):
            rooms = [torch.full((n + 64,), 5.0, device=device) for _ in range(3)]
            out = torch.full((n + 64,), 5.0, dtype=torch.bfloat16, device=device)
            grad = torch.ones(n + 64, dtype=torch.bfloat16, device=device)
            p, m, v, o, g = (t[first : first + n] for t in (*rooms, out, grad))
            kernels.adamw(p, g, m, v, lr=0.1, step=1, param_out=o)
            for room in (*rooms, out):
                assert bool((room[:first] == 5.0).all() & (room[first + n :] == 5.0).all())
                assert bool((room[first : first + n] != 5.0).all())


def test_native_matches_torch_at_any_number_of_threads():
    """More parts than one, streaming stores included (they begin at 2^20 elements)."""
    if native_backend.library() is None:
        pytest.skip("libzeroplan_cpu is not built")
    n, before = (1 << 20) + 77, torch.get_num_threads()
    tensors = inputs(n, torch.bfloat16)
    with using("torch") as device:
        want = apply("adamw", device, tensors, torch.bfloat16)
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            for target in ("native-plain", "native-avx2", "native-avx512"):
                try:
                    with using(target) as device:
                        got = apply("adamw", device, tensors, torch.bfloat16)
                except pytest.skip.Exception:
                    continue
                assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), (threads, target)
    finally:
        torch.set_num_threads(before)


@all_targets
def test_lamb_over_parts_of_tensors(target):
    """Two ranks that each hold half of the buffer, adding their norms, get what one rank gets that holds it all."""
    n, cut, bounds = 40000, 17003, [0, 3, 3, 20000, 39999, 40000]
    tensors = inputs(n, torch.bfloat16)
    with using(target) as device:
        whole = apply("lamb", device, tensors, torch.bfloat16, bounds=bounds)
        norms: list[torch.Tensor] = []
        parts = []
        for turn in range(2):  # the first turn collects both ranks' norms, the second adds the other's
            for rank, (begin, end) in enumerate(((0, cut), (cut, n))):
                mine = [min(max(b, begin), end) - begin for b in bounds]

                def reduce(squares, rank=rank, turn=turn):
                    if turn == 0:
                        norms.append(squares.clone())
                    else:
                        squares += norms[1 - rank]

                part = [t[begin:end] for t in tensors]
                parts.append(apply("lamb", device, part, torch.bfloat16, bounds=mine, reduce=reduce))
    for i, want in enumerate(whole):
        got = torch.cat([parts[2][i], parts[3][i]])
        torch.testing.assert_close(got, want, rtol=1e-2 if got.dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_misfits_are_named():
    p, g, m, v = inputs(8, torch.bfloat16)
    cases = [
        ((p.half(), g, m, v), "expected param of torch.float32 but got torch.float16"),
        ((p, g[:7], m, v), "expected grad of 8 elements"),
        ((p, g, m.reshape(2, 4), v), "expected first state flat"),
        ((p, g.double(), m, v), "expected grad of"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            kernels.adamw(*arguments, lr=0.1, step=1)
    with pytest.raises(ValueError, match="expected a step of at least 1 but got 0"):
        kernels.adamw(p, g, m, v, lr=0.1, step=0)
    with pytest.raises(ValueError, match="expected bounds that rise from 0"):
        kernels.make_segments([0, 5, 3], "cpu")
    with pytest.raises(ValueError, match="expected segments of 8 elements"):
        kernels.lamb(p, g, m, v, kernels.make_segments([0, 7], "cpu"), lr=0.1, step=1)
