"""Modules that are called several times: traced activations equal what plain torch keeps, and depth counts every call."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.trace.test_folding import renumbered, whole_trace
from zeroplan.core.model_config import auto_class_of
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.options import Arithmetic, Checkpointing, TraceOptions
from zeroplan.trace.api import trace_at, trace_model, trace_module
from zeroplan.trace.fit import TracePoint

pytestmark = pytest.mark.torch

WIDTH = 16
ROWS = 64
INPUT = 4 * ROWS * WIDTH


class Block(nn.Module):
    """Calls parts, some of them more than once, and some under a checkpoint."""

    def __init__(self, parts: list[nn.Module], calls: list[tuple[int, str]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, WIDTH] to the same."""
        for part, how in self.calls:
            module = self.parts[part]
            if how == "plain":
                x = module(x)
            elif how == "residual":
                x = x + module(x)
            else:
                x = checkpoint(module, x, use_reentrant=False, preserve_rng_state=False)
        return x


class Whole(nn.Module):
    """A block and the loss of what it returns."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, WIDTH] to a scalar."""
        return self.block(self.first(x)).square().mean()


def module_of(draw: random.Random, pool: list[nn.Module], depth: int) -> nn.Module:
    """Return a module whose parts come from one pool, so that several places share them."""
    if not depth or draw.random() < 0.3:
        return draw.choice(pool)
    parts = [module_of(draw, pool, depth - 1) for _ in range(draw.randint(1, 3))]
    calls = [
        (draw.randrange(len(parts)), draw.choice(["plain", "plain", "residual", "checkpoint"]))
        for _ in range(draw.randint(1, 4))
    ]
    made = Block(parts, calls)
    pool.append(made)
    return made


def make(seed: int) -> Whole:
    """Return one module."""
    draw = random.Random(seed)
    pool: list[nn.Module] = [
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH, bias=False)),
        nn.Softmax(-1),
        nn.Tanh(),
    ]
    return Whole(module_of(draw, pool, 3))


def plain(module: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Return the bytes that a forward leaves and the most that there are until its backward has ended, as torch counts them."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
        loss = module(x)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
        loss.backward()
    left = sum(memory_of(forward))
    now = left
    most = 0
    for size in memory_of(backward):
        now += size
        most = max(most, now)
    return left, most


def memory_of(profiled: Any) -> list[int]:
    found = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]


def traced(tape: ExpandedTape) -> tuple[int, int]:
    """Return the same of a tape."""
    now = left = most = 0
    size: dict[int, int] = {}
    backward = False
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.ALLOC:
            size[arg] = aux
            now += aux
        elif op == Op.FREE:
            now -= size.pop(arg)
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            left, backward = now, True
        if backward:
            most = max(most, now)
    return left, most


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_activations_are_what_plain_torch_keeps(seed: int) -> None:
    """For a module in which some modules are called several times, nested, and under checkpoints.

    Where a recomputation within another one ends early, by an exception, the trace may have one output more at that moment.
    """
    module = make(seed)
    expected = plain(copy.deepcopy(module), torch.randn(ROWS, WIDTH))
    tape = trace_module(
        module, lambda: {"x": torch.empty(ROWS, WIDTH, device="meta")}, TraceOptions(arithmetic=Arithmetic.FP32)
    ).expand(1, 1)
    left, most = traced(tape)
    assert left - INPUT == expected[0]
    assert abs(most - INPUT - expected[1]) <= INPUT


def calls_of(module: nn.Module) -> Counter[int]:
    """Count the calls of each module in one forward, by its id."""
    calls = Counter[int]()
    for part in module.modules():
        part.register_forward_pre_hook(lambda part, _: calls.update([id(part)]))
    module(torch.randn(2, WIDTH))
    return calls


def test_random_modules_call_some_of_theirs_several_times() -> None:
    """So that the test above is about what it says."""
    repeated = sum(max(calls_of(make(seed)).values()) > 1 for seed in range(40))
    assert repeated > 20


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 300,
    "num_hidden_layers": 12,
}
ALBERT = {**SMALL, "model_type": "albert", "architectures": ["AlbertForMaskedLM"], "embedding_size": 32}
GROUPS = {**ALBERT, "num_hidden_groups": 3, "inner_group_num": 2}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "num_key_value_heads": 4}
ZAMBA = {
    **SMALL,
    **MAMBA,
    "model_type": "zamba",
    "architectures": ["ZambaForCausalLM"],
    "n_mamba_heads": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 2,
    "use_mamba_kernels": False,
}
ZAMBA2 = {
    **SMALL,
    "model_type": "zamba2",
    "architectures": ["Zamba2ForCausalLM"],
    "layers_block_type": ["mamba", "mamba", "hybrid"] * 4,
    "mamba_d_state": 8,
    "mamba_headdim": 32,
    "n_mamba_heads": 4,
    "num_key_value_heads": 4,
    "num_mem_blocks": 2,
    "chunk_size": 16,
    "use_mem_rope": False,
}


@pytest.mark.parametrize("config", [ALBERT, GROUPS], ids=["albert", "groups"])
def test_a_layer_called_at_every_depth_counts_at_every_depth(config: dict[str, Any]) -> None:
    there = whole_trace(config, TraceOptions(zero3=True), TracePoint(2, 40))
    folded = trace_model(config, auto_class_of(config), TraceOptions(zero3=True)).expand(2, 40)
    assert renumbered(folded) == renumbered(there)
    assert folded.params == there.params


@pytest.mark.parametrize("config", [pytest.param(ZAMBA, marks=pytest.mark.long), ZAMBA2], ids=["zamba", "zamba2"])
def test_blocks_that_share_a_module_are_counted_in_its_place(config: dict[str, Any]) -> None:
    """At one point: without their kernels these models loop over tokens."""
    point, options = TracePoint(2, 8), TraceOptions(checkpointing=Checkpointing.NON_REENTRANT, zero3=True)
    there, folded = whole_trace(config, options, point), trace_at(config, auto_class_of(config), options, point)
    assert renumbered(folded.expand(2, 8)) == renumbered(there)


class Tokens(nn.Module):
    """Two learnt rows before the samples' own, as a vision transformer's class and distillation tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, WIDTH] to a scalar."""
        rows = [token.expand(len(x), -1, -1) for token in (self.first, self.second)]
        return torch.cat([*rows, x], 1).square().mean()


def test_gradients_that_are_views_of_one_block_are_freed_once() -> None:
    """Of one sample, whose expansion copies nothing."""
    tape = trace_module(
        Tokens(), lambda: {"x": torch.empty(1, 4, WIDTH, device="meta")}, TraceOptions(arithmetic=Arithmetic.FP32)
    ).expand(1, 1)
    handed = [storage for op, storage in zip(tape.op, tape.aux, strict=True) if op == Op.GRAD]
    assert len(handed) == len(set(handed)) == 2
