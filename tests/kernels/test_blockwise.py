"""AdamW with blockwise states: the maps, the codes, and that every path gives the bits of a plain reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.kernels.blockwise_reference import BlockwiseAdamW, levels, rounded
from tests.kernels.targets import all_targets, same_bits, using
from zeroplan_runtime import kernels
from zeroplan_runtime.kernels import native_backend
from zeroplan_runtime.kernels.block_quantisation import BlockFormat, block_format, decode, encode, map_words

FORMATS = (block_format(8, 256), block_format(4, 128))
each_format = pytest.mark.parametrize("kept", FORMATS, ids=lambda kept: f"{kept.bits}bit")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


def empty_states(n: int, kept: BlockFormat, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    codes = [torch.zeros(n // kept.codes_a_byte, dtype=torch.uint8, device=device) for _ in range(2)]
    return [*codes, torch.zeros(2 * kept.blocks(n), device=device)]


def values(states: list[torch.Tensor], kept: BlockFormat) -> list[torch.Tensor]:
    scales = states[2].view(-1, 2)
    return [decode(states[i], scales[:, i], kept, which) for i, which in enumerate((kept.first, kept.second))]


def train(device, kept, start, grads, out=None, scalars=None, **hyper) -> list[torch.Tensor]:
    """Steps with each gradient in turn; parameter, codes, scales and the written parameter, on the CPU."""
    p, states = start.to(device, copy=True), empty_states(start.numel(), kept, device)
    written = None if out is None else torch.full((p.numel(),), 7.0, dtype=out, device=device)
    more = {**HYPER, **hyper, "param_out": written, "scalars": None if scalars is None else scalars.to(device)}
    for number, grad in enumerate(grads):
        kernels.adamw_blockwise(p, grad.to(device), *states, kept, step=number + 1, **more)
    return [t.cpu() for t in (p, *states, *([] if written is None else [written]))]


def gradients(n: int, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Of many magnitudes, so that every decade of the maps is used; the last blocks are tiny, zero and equal in magnitude."""
    make = torch.Generator().manual_seed(seed)
    made = [torch.randn(n, generator=make) * 10 ** (torch.rand(n, generator=make) * 8 - 8) for _ in range(count)]
    for grad in made:
        grad[-256:] *= 1e-30
        grad[-512:-256] = 0.0
        grad[-768:-512] = grad[-768:-512].sign()
    return made


@each_format
def test_levels_are_those_of_the_papers(kept: BlockFormat) -> None:
    for moment, which in enumerate((kept.first, kept.second)):
        assert len(set(which.levels)) == 2**kept.bits
        assert sorted(which.levels) == levels(kept.bits, moment).float().tolist()
    assert kept.first.levels[0] == 0.0  # memory full of zeros holds zeros


@each_format
def test_bins_find_the_nearest_level(kept: BlockFormat) -> None:
    """At every border, one step of fp32 beside it, and where bins begin."""
    words = map_words(kept.bits, kept.block, torch.device("cpu")).to(torch.int64)
    tables = words[2 * 2**kept.bits :].view(2, -1)
    for which, table in zip((kept.first, kept.second), tables, strict=True):
        borders = torch.tensor(which.borders)
        bits = torch.cat([borders.view(torch.int32) + i for i in (-1, 0, 1)] + [torch.arange(0, 0x3F80_0000, 40_503).int()])
        at = ((bits >> 16) - ((127 - 24) << 7)).clamp(0, table.numel() - 1).long()
        found = (table[at] & 0xFF) + ((bits & 0xFFFF) >= (table[at] >> 8))
        assert torch.equal(found, torch.searchsorted(borders, bits.view(torch.float32), right=True))
        assert all(a < b for a, b in pairwise(which.borders))


@each_format
def test_codes_stand_for_the_nearest_level(kept: BlockFormat) -> None:
    grads = torch.cat(gradients(kept.block * 30, 2))
    for moment, (which, x) in enumerate(((kept.first, grads), (kept.second, grads * grads))):
        codes, scales = encode(x, kept, which)
        found = decode(codes, scales, kept, which)
        assert same_bits(found + 0.0, rounded(x, kept.bits, moment) + 0.0)
        again = encode(found, kept, which)
        assert torch.equal(codes, again[0])  # what is decoded encodes to itself
        assert torch.equal(scales, again[1])


def test_a_hand_case() -> None:
    """Worked out by hand: 4 bits, one block whose gradients are 4, −2 and 2⁻⁵⁰, from zero moments."""
    kept = FORMATS[1]
    p, grad = torch.ones(128), torch.full((128,), 2.0**-50)
    grad[0], grad[1] = 4.0, -2.0
    states = empty_states(128, kept)
    exact = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.0, "weight_decay": 0.0, "step": 1}
    kernels.adamw_blockwise(p, grad, *states, kept, **exact)
    # m = g/2, v = g²/4, √v/√(1−0.75) = |g|, η/(1−0.5) = 1: p = 1 − m/|g| = 1 ∓ 1/2
    assert p[:3].tolist() == [0.5, 1.5, 0.5]
    # Scales 2 and 4. m: 2/2 is level 1, rank 8; −1/2 is nearest to −0.4375 of 0.2125, 0.4375, 0.6625, 0.8875: rank 5, 8 + 5.
    assert states[2].tolist() == [2.0, 4.0]
    assert int(states[0][0]) == 8 | (13 << 4)
    # v: 4/4 is level 16/16, rank 15; 1/4 is 4/16, rank 3; next to nothing has the least level, 1/16.
    assert states[1][:2].tolist() == [15 | (3 << 4), 0]
    m, v = values(states, kept)
    assert (m[:3].tolist(), v[:3].tolist()) == ([2.0, -0.875, 0.0], [4.0, 1.0, 0.25])


@all_targets
@each_format
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_equal_those_of_the_reference(target, kept: BlockFormat, dtype: torch.dtype) -> None:
    n, steps = kept.block * 9, 6
    grads = [grad.to(dtype) for grad in gradients(n, steps)]
    start = torch.randn(n, generator=torch.Generator().manual_seed(5))
    plain = start.clone()
    reference = BlockwiseAdamW([plain], bits=kept.bits, **HYPER)
    scalars = torch.tensor([0.0, 0.0, 0.75, 0.0])
    for grad in grads:
        plain.grad = grad.float() * 0.75
        reference.step()
    for out in (torch.bfloat16, torch.float16, None):
        with using(target) as device:
            p, *rest = train(device, kept, start, grads, out, scalars)
        assert same_bits(p, plain)
        for found, key in zip(values(rest[:3], kept), "mv", strict=True):
            assert same_bits(found + 0.0, reference.state[plain][key] + 0.0)
        if out is not None:
            assert same_bits(rest[3], p.to(out))


@all_targets
@each_format
def test_bits_equal_those_of_the_torch_path(target, kept: BlockFormat) -> None:
    """Codes and scales, too, over more than one part of the work, and at any number of threads."""
    n = (1 << 19) + kept.block * 3
    start, grads = torch.randn(n, generator=torch.Generator().manual_seed(1)), [g.bfloat16() for g in gradients(n, 2)]
    with using("torch") as device:
        want = train(device, kept, start, grads, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with using(target) as device:
                got = train(device, kept, start, grads, torch.bfloat16)
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), threads
    finally:
        torch.set_num_threads(before)


@all_targets
@each_format
def test_what_is_not_finite_shows(target, kept: BlockFormat) -> None:
    """A gradient that is not finite, in a step that is not skipped, spoils its parameter; the next block keeps its bits."""
    n = 3 * kept.block
    start, grads = torch.ones(n), gradients(n, 2)
    with using(target) as device:
        want = train(device, kept, start, grads)
        for bad in (float("inf"), float("nan")):
            grads[0][5] = bad
            p, *_ = train(device, kept, start, grads)
            assert not torch.isfinite(p[5])
            assert same_bits(p[kept.block :], want[0][kept.block :])


@all_targets
@each_format
def test_skip_leaves_everything(target, kept: BlockFormat) -> None:
    start, skips = torch.randn(2 * kept.block), torch.tensor([0.0, 0.0, 1.0, 1.0])
    with using(target) as device:
        p, *states, out = train(device, kept, start, [torch.ones(2 * kept.block)], torch.bfloat16, skips)
    assert same_bits(p, start)
    assert all(bool((state == 0).all()) for state in states)
    assert bool((out == 7.0).all())


@all_targets
@each_format
def test_neighbours_are_left_alone(target, kept: BlockFormat) -> None:
    block = kept.block
    with using(target) as device:
        room = torch.full((4 * block,), 5.0, device=device)
        states = [torch.full_like(t, 3) for t in empty_states(4 * block, kept, device)]
        inside = [t[t.numel() // 4 : t.numel() // 2] for t in states]
        grad = torch.ones(4 * block, device=device)
        kernels.adamw_blockwise(room[block : 2 * block], grad[block : 2 * block], *inside, kept, step=1, **HYPER)
        for t, fill in ((room, 5.0), *((t, 3) for t in states)):
            quarter = t.numel() // 4
            assert bool((t[:quarter] == fill).all() & (t[2 * quarter :] == fill).all())
            assert bool((t[quarter : 2 * quarter] != fill).any())


@each_format
def test_misfits_are_named(kept: BlockFormat) -> None:
    n = 2 * kept.block
    p, g, states = torch.zeros(n), torch.ones(n), empty_states(n, kept)
    m, v, scales = states
    cases = [
        ((p[:-1], g[:-1], m, v, scales), f"expected a multiple of {kept.block} elements"),
        ((p, g, m[:-1], v, scales), "first state of torch.uint8"),
        ((p, g, m, v.int(), scales), "second state of torch.uint8"),
        ((p, g, m, v, scales[:2]), "scales of torch.float32"),
        ((p.half(), g, m, v, scales), "expected param of torch.float32"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            kernels.adamw_blockwise(*arguments, kept, lr=0.1, step=1)
    room = torch.zeros(n + 1)
    with pytest.raises(ValueError, match="begin on a multiple of four"):
        kernels.adamw_blockwise(room[1:], g, *states, kept, lr=0.1, step=1)


def test_the_library_has_the_routine() -> None:
    library = native_backend.library()
    if library is None:
        pytest.skip("libzeroplan_cpu is not built")
    assert library.zeroplan_adam_blockwise.argtypes is not None
