"""Momentum in one bit an element: every backend against a reference in numpy, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.kernels.targets import all_targets, same_bits, using
from zeroplan.core.one_bit import SCALE_BLOCK, message_words
from zeroplan_runtime import kernels

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Elements of a chunk: less than a block, a whole one, several with a rest.
SHARDS = (64, SCALE_BLOCK, 2 * SCALE_BLOCK + 192)


def scales_of(values: np.ndarray) -> np.ndarray:
    """The mean magnitude of each block, exact and then rounded to fp32."""
    blocks = [values[i : i + SCALE_BLOCK].astype(np.float64) for i in range(0, len(values), SCALE_BLOCK)]
    return np.array([math.fsum(np.abs(block)) / len(block) for block in blocks], dtype=np.float32)


def compressed(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """A message's signs and scales, and what it stands for."""
    scales, above = scales_of(values), values >= 0
    each = np.repeat(scales, SCALE_BLOCK)[: len(values)]
    return np.packbits(above, bitorder="little").tobytes() + scales.tobytes(), np.where(above, each, -each)


def message_bytes(message: torch.Tensor, shard: int) -> bytes:
    used = shard // 8 + 4 * len(scales_of(np.zeros(shard)))
    return message.cpu().numpy().tobytes()[:used]


def randn(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@all_targets
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_rank_packs_its_momentum_for_every_rank(target: str, shard: int, dtype: torch.dtype) -> None:
    ranks, beta1 = 3, 0.9
    momentum, grad, error = randn(ranks * shard, 0), randn(ranks * shard, 1).to(dtype), randn(ranks * shard, 2) / 8
    scalars = torch.zeros(8)
    scalars[kernels.FACTOR] = 0.3
    m, g, e = momentum.numpy(), grad.float().numpy(), error.numpy()
    c = np.float32(beta1) * m + np.float32(1 - beta1) * (g * np.float32(scalars[kernels.FACTOR])) + e
    with using(target) as device:
        left, messages = error.to(device), torch.empty(ranks * message_words(shard), device=device)
        kernels.sign_pack(
            momentum.to(device), grad.to(device), left, messages, ranks=ranks, beta1=beta1, scalars=scalars.to(device)
        )
        unpacked, mixed = torch.empty(ranks * shard, device=device), momentum.to(device, copy=True)
        kernels.sign_unpack(messages, unpacked, ranks=ranks)
        kernels.sign_unpack(messages, mixed, ranks=ranks, decay=beta1)
    wanted = [compressed(chunk) for chunk in c.reshape(ranks, shard)]
    for (message, _), got in zip(wanted, messages.view(ranks, -1), strict=True):
        assert message_bytes(got, shard) == message
    values = np.concatenate([values for _, values in wanted])
    assert same_bits(unpacked, torch.from_numpy(values))
    assert same_bits(mixed, torch.from_numpy(m * np.float32(beta1) + values * np.float32(1 - beta1)))
    assert same_bits(left, torch.from_numpy(c - values))


@all_targets
@pytest.mark.parametrize("shard", SHARDS)
def test_a_rank_averages_what_it_receives(target: str, shard: int) -> None:
    ranks = 3
    sent = [randn(shard, seed) * (seed + 1) for seed in range(ranks)]
    error = randn(shard, 9) / 8
    mean = np.zeros(shard, dtype=np.float32)
    for values in sent:
        mean += compressed(values.numpy())[1]
    c = mean * np.float32(1 / ranks) + error.numpy()
    with using(target) as device:
        zeros = torch.zeros(shard, device=device)
        received = torch.empty(ranks, message_words(shard), device=device)
        for values, message in zip(sent, received, strict=True):  # β₁ = 0: the gradient is what is sent
            kernels.sign_pack(zeros, values.to(device), zeros.clone(), message, ranks=1, beta1=0.0)
        left, message = error.to(device), torch.empty(message_words(shard), device=device)
        kernels.sign_average(received.view(-1), left, message, ranks=ranks)
    wanted, values = compressed(c)
    assert message_bytes(message, shard) == wanted
    assert same_bits(left, torch.from_numpy(c - values))


@all_targets
def test_a_skipped_step_changes_neither_errors_nor_momentum(target: str) -> None:
    shard, scalars = 128, torch.zeros(8)
    scalars[kernels.SKIP] = 1.0
    with using(target) as device:
        scalars = scalars.to(device)
        momentum, grad = randn(2 * shard, 0).to(device), torch.full((2 * shard,), math.inf, device=device)
        worker, server = randn(2 * shard, 1).to(device), randn(shard, 2).to(device)
        before = [one.clone() for one in (momentum, worker, server)]
        messages = torch.empty(2 * message_words(shard), device=device)
        kernels.sign_pack(momentum, grad, worker, messages, ranks=2, beta1=0.9, scalars=scalars)
        kernels.sign_average(messages, server, messages[: message_words(shard)], ranks=2, scalars=scalars)
        kernels.sign_unpack(messages, momentum, ranks=2, scalars=scalars)
        param, out = momentum.clone(), torch.zeros(2 * shard, dtype=torch.bfloat16, device=device)
        kernels.frozen_adam(param, worker, worker, lr=1.0, step=3, second_step=2, param_out=out, scalars=scalars)
    for one, old in zip((momentum, worker, server), before, strict=True):
        assert same_bits(one, old)
    assert same_bits(param, before[0])
    assert not out.any()


def test_a_magnitude_is_the_mean_by_hand() -> None:
    values = torch.tensor([1.0, -3.0, 0.0, -0.0] * 16)
    message, error = torch.zeros(message_words(64)), torch.zeros(64)
    kernels.sign_pack(torch.zeros(64), values, error, message, ranks=1, beta1=0.0)
    assert message.view(torch.uint8)[:8].tolist() == [0b11011101] * 8
    assert message[2] == 1.0
    assert error.tolist() == [0.0, -2.0, -1.0, -1.0] * 16


@all_targets
@pytest.mark.parametrize("out", [None, torch.bfloat16])
def test_adam_with_a_second_moment_that_stays(target: str, out: torch.dtype | None) -> None:
    n = SCALE_BLOCK + 7
    p, m, v = randn(n, 0), randn(n, 1), randn(n, 2).square()
    v[::5] = 0.0
    hyper = {"lr": 1e-2, "step": 7, "second_step": 4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    wide = [one.double() for one in (p, m, v)]
    root = (wide[2] / (1 - 0.95**4)).sqrt() + 1e-6
    step = torch.where(wide[2] == 0, 0.0, wide[1] / (1 - 0.9**7) / root)
    wanted = wide[0] * (1 - 1e-3) - 1e-2 * step
    with using(target) as device:
        got = p.to(device, copy=True)
        written = None if out is None else torch.empty(n, dtype=out, device=device)
        kernels.frozen_adam(got, m.to(device), v.to(device), param_out=written, **hyper)
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-6, atol=1e-6)
    if written is not None:
        assert same_bits(written, got.to(out))
    with using("torch"):
        plain = p.clone()
        kernels.frozen_adam(plain, m, v, **hyper)
    assert same_bits(got, plain)


@pytest.mark.parametrize(("shard", "words", "dtype"), [(100, 8, torch.float32), (64, 5, torch.float32), (64, 4, torch.float16)])
def test_what_does_not_fit_is_refused(shard: int, words: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="expected 1 messages"):
        kernels.sign_unpack(torch.zeros(words, dtype=dtype), torch.zeros(shard), ranks=1)
