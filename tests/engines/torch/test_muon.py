"""Muon beside AdamW under DDP and FSDP2: the plan's states and temporaries are those of torch."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from zeroplan.core.buffers import Buffer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.engines.fsdp2.rank import Fsdp2Rank
from zeroplan.engines.torch_rank import muon_takes
from zeroplan.engines.torch_step import optimizer_step
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape, TapeModule, TapeParam

if TYPE_CHECKING:
    from tests.runtime.ranks import RankPool


def _tape(shapes: dict[str, tuple[int, ...]]) -> ExpandedTape:
    params = tuple(TapeParam(name, shape, True, 4) for name, shape in shapes.items())
    return ExpandedTape((TapeModule("", "Model", -1, tuple(range(len(params)))),), params)


def _played(recorder: Recorder) -> tuple[Counter[Buffer], int]:
    """Bytes alive at the end by buffer, and the most that the events' temporaries take at once."""
    buffers = [buffer for buffer, _ in recorder.labels_of(recorder.handles)]
    alive: Counter[Buffer] = Counter()
    sizes: list[int] = []
    most = 0
    for word, value in zip(recorder.code, recorder.value, strict=True):
        op = word & ((1 << OP_BITS) - 1)
        if op == AllocatorOp.ALLOC:
            sizes.append(value)
            alive[buffers[len(sizes) - 1]] += value
        elif op == AllocatorOp.FREE:
            alive[buffers[value]] -= sizes[value]
        most = max(most, alive[Buffer.OPTIM_TEMP])
    return alive, most


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [1, 2])
def test_muon_keeps_and_needs_what_torch_allocates(pool: RankPool, ranks: int) -> None:
    from tests.engines.torch.muon_step import SHAPES, step

    kept, peaks = pool.run(ranks, step, ranks, "muon")[0]
    tape = _tape(SHAPES)
    rank = Fsdp2Rank(workload=Workload.of(optimizer="muon"), parameters=tape.parameters, layout=ParallelLayout(ranks))
    recorder = Recorder()
    optimizer_step(recorder, rank, applied=True, first=True)
    alive, most = _played(recorder)
    matrices = sum(math.prod(shape) for name, shape in SHAPES.items() if name.startswith("layers.0.") and len(shape) == 2)
    rest = sum(math.prod(shape) for shape in SHAPES.values()) - matrices
    assert alive[Buffer.OPTIM_MOMENTUM] == kept["momentum_buffer"] == 4 * matrices // ranks
    assert alive[Buffer.OPTIM_EXP_AVG] == kept["exp_avg"] == 4 * rest // ranks
    assert alive[Buffer.OPTIM_EXP_AVG_SQ] == kept["exp_avg_sq"] == 4 * rest // ranks
    counts = alive[Buffer.OPTIM_TEMP]
    assert counts == kept["step"] == 4 * 3
    assert [most - counts] * len(peaks) == pytest.approx(peaks, abs=64)  # norms and flags are scalars


@pytest.mark.parametrize(
    ("name", "dimensions", "taken"),
    [
        ("model.layers.0.mlp.up_proj.weight", 2, True),
        ("transformer.h.11.attn.c_attn.weight", 2, True),
        ("base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight", 2, True),
        ("transformer.wte.weight", 2, False),
        ("lm_head.weight", 2, False),
        ("model.layers.0.input_layernorm.weight", 1, False),
        ("model.layers.0.mlp.experts.gate_up_proj", 3, False),
        ("vision.layers.0.patch_embedding.weight", 2, False),
    ],
)
def test_what_muon_takes(name: str, dimensions: int, taken: bool) -> None:
    assert muon_takes(name, dimensions) is taken
