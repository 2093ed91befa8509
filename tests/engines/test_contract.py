"""The contract of every engine: what its ledger says is alive after a step is what its schedule leaves alive.

Ledger and schedule compute a buffer's bytes in two ways: from sums over the model's parameters, and block by block in the order
of a run. Each engine of the registry is asked for every optimizer, stage, offload and precision that it does not refuse.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from tests.engines.deepspeed.llama_tape import adapters_only, llama_tape
from tests.workloads import with_flat
from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizer_row import DEFAULT_OPTIMIZER
from zeroplan.core.optimizers import OPTIMIZERS
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.registry import engine_names, find_engine
from zeroplan.ledger.line import evaluate
from zeroplan.models.grouping import units_of_tensors
from zeroplan.models.spec import ModelSpec, Tensor
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.allocator.pinned_host import PAGE
from zeroplan.simulate.timeline import Timeline
from zeroplan.tape.expanded import ExpandedTape
from zeroplan.techniques.optimizers import RUNTIME_OPTIMIZERS

RANKS = 3
#: What the tape allocates and frees, and no ledger knows.
OF_THE_TAPE = {
    Buffer.ACTIVATION,
    Buffer.ACTIVATION_CHECKPOINT,
    Buffer.ACTIVATION_TEMP,
    Buffer.COMM_ACTIVATION,
    Buffer.INPUT,
    Buffer.LOGITS,
    Buffer.MODEL_BUFFER,
}


def _spec(tape: ExpandedTape) -> ModelSpec:
    tables = {p for module in tape.modules if module.type == "Embedding" for p in module.params}
    kinds = {p: module.type for module in tape.modules for p in module.params if module.type == "Linear"}
    tensors = [
        Tensor(p.name, p.shape, p.trainable, kind="embedding" if i in tables else "linear" if i in kinds else "")
        for i, p in enumerate(tape.params)
    ]
    head = tape.params[tape.modules[-1].params[0]]  # tied to the embedding
    tensors.append(Tensor("lm_head.weight", head.shape, head.trainable, tied_to=head.name, kind="head"))
    return ModelSpec("llama", units_of_tensors(tensors), "test", "llama")


def _left_alive(run: Timeline) -> Counter[Buffer]:
    """Bytes alive after the last step by buffer, as requested."""
    code, value, labels = run.recorded
    last = [at for at, mark in zip(run.result.marks, run.marks, strict=True) if mark.name.startswith("step")][-1].event
    buffers = [buffer for buffer, _ in labels.labels_of(range(len(run.result.block_sizes)))]
    alive: Counter[Buffer] = Counter()
    sizes: list[int] = []
    for word, number in zip(code[:last], value[:last], strict=True):
        op = word & ((1 << OP_BITS) - 1)
        if op == AllocatorOp.ALLOC:
            alive[buffers[len(sizes)]] += number
            sizes.append(number)
        elif op == AllocatorOp.FREE:
            alive[buffers[number]] -= sizes[number]
    return alive


def ledger_and_schedule_differ(case: Case, engine: Engine, tape: ExpandedTape) -> dict[str, tuple[int, int]]:
    """Ledger and schedule by buffer and place, where they differ by more than scalars."""
    found = engine.simulate(case, tape)
    kept = [item for item in evaluate(*engine.ledger(case)) if {Phase.FORWARD, Phase.STEP} <= set(item.phases)]
    told: Counter[tuple[Buffer, Place]] = Counter()
    for item in kept:
        told[item.buffer, item.place] += item.bytes
    differ = {}
    # A step count, a flag or a norm is a scalar, of which a tensor may have two; an 8-bit state's scales round by tensor.
    slack = 8 * len(tape.params) + 64
    # Lines are those of the rank that holds the most of each buffer.
    left: Counter[Buffer] = Counter()
    for run in found.runs:
        left |= _left_alive(run)
    for buffer in ({b for b, place in told if place is Place.HBM} | set(left)) - OF_THE_TAPE:
        if abs(told[buffer, Place.HBM] - left[buffer]) > slack:
            differ[f"{buffer} on hbm"] = (told[buffer, Place.HBM], left[buffer])
    host = Counter(dict(found.host[-1].kept)) if found.host else Counter()
    for buffer, place in {key for key in (*told, *host) if key[1] is Place.DRAM}:
        if abs(told[buffer, place] - host[buffer, place]) > slack:
            differ[f"{buffer} in {place}"] = (told[buffer, place], host[buffer, place])
    return differ | _pinned_differences(told, host, blocks=4 * len(tape.params))


def _pinned_differences(
    told: Counter[tuple[Buffer, Place]], host: Counter[tuple[Buffer, Place]], blocks: int
) -> dict[str, tuple[int, int]]:
    """Pinned memory, whose blocks torch rounds up to powers of two, and the system to pages.

    A schedule tells what was asked for, and the rounding as fragmentation; a line tells whole blocks. The blocks of what only
    initialisation needs stay in torch's cache, where a later buffer may take them over: a line counts them once more.
    """
    differ = {}
    pinned = {buffer for buffer, place in (*told, *host) if place is Place.PINNED}
    for buffer in pinned - {Buffer.FRAGMENTATION, Buffer.INIT_TEMP}:
        told_bytes, asked = told[buffer, Place.PINNED], host[buffer, Place.PINNED]
        if not asked <= told_bytes < 2 * asked + PAGE * blocks:
            differ[f"{buffer} in pinned"] = (told_bytes, asked)
    all_told, all_held = (sum(one[buffer, Place.PINNED] for buffer in pinned) for one in (told, host))
    if not all_told - told[Buffer.INIT_TEMP, Place.PINNED] - PAGE * blocks <= all_held <= all_told + PAGE * blocks:
        differ["pinned"] = (all_told, all_held)
    return differ


@dataclass(frozen=True)
class Options:
    engine: str
    zero: ZeroConfig

    def __str__(self) -> str:
        zero = self.zero
        return f"{self.engine} {zero.stage} {zero.offload_optimizer.device}/{zero.offload_param.device}"


OPTIONS = [Options(name, zero) for name in engine_names() for zero in find_engine(name).options()]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_the_ledger_keeps_the_schedule_leaves_alive(options: Options) -> None:
    engine = find_engine(options.engine)
    ran = 0
    for dtype in DType:
        precision = engine.precision(dtype)
        whole = llama_tape(2, 2 if precision is Precision.MIXED else 4)
        for name, row in OPTIMIZERS.items():
            if row.runtime_only and not RUNTIME_OPTIMIZERS.taken_by(engine):
                continue
            kind = OptimizerKind.FUSED if row.fused else OptimizerKind.FOREACH
            workload = Workload.of(seq_len=128, dtype=dtype, precision=precision, optimizer=name, optimizer_kind=kind)
            # Every optimizer trains the whole model; those that divide its parameters, and the default, adapters as well.
            for adapters in (False, True) if row.rest or name == DEFAULT_OPTIMIZER else (False,):
                tape = adapters_only(whole) if adapters else whole
                work = with_flat(workload, grad_accum=2) if adapters else workload
                case = Case(_spec(tape), work, Cluster.of(gpus=RANKS), options.zero)
                try:
                    engine.require_runnable(options.zero)
                    engine.require_workload(case)
                except BadInput:
                    continue
                ran += 1
                assert ledger_and_schedule_differ(case, engine, tape) == {}, (
                    f"{options} {dtype} {name} {'adapters' if adapters else ''}"
                )
    assert ran >= 3
