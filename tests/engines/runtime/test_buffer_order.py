"""What comes and goes in a step of a real run does so in the plan's order, buffer by buffer.

Together with the rows' sizes this places every gradient buffer within the backward; the tensors of the model's own computation
are held against the same plan by ``zeroplan verify``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ADAMW
from tests.validate.small import CONFIG
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.engines.case import Case
from zeroplan.engines.runtime import simulation as planned_run
from zeroplan.engines.runtime.engine import Runtime
from zeroplan.models.load import load_model
from zeroplan.planner.tapes import expanded_tape_of
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.recorder import Recorder

pytestmark = pytest.mark.torch

#: Buffer, unit, and bytes taken or (negative) given.
Change = tuple[str, str, int]


def recorded(group: dist.ProcessGroup, config: dict[str, Any]) -> list[Change]:
    """The allocations (positive bytes) and frees (negative) of the second step, in order."""
    import transformers

    import zeroplan_runtime

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIG)).train()
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
    log: list[Change] = []
    record = engine.arena.record

    def logged(row: Any, size: int) -> None:
        log.append((str(row.buffer), row.unit, size))
        record(row, size)

    for step in range(2):
        if step == 1:
            engine.arena.record = logged
        for micro in range(engine.gradient_accumulation_steps()):
            tokens = models.batch(step, micro, 0)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    return log


def planned(config: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[Change]:
    """The same in the plan's simulation, read off what it records."""
    recorders: list[Recorder] = []

    def record() -> Recorder:
        recorders.append(Recorder())
        return recorders[-1]

    monkeypatch.setattr(planned_run, "Recorder", record)
    engine = Runtime().with_ds_config(read_ds_config(config, dialect=Dialect.RUNTIME))
    reduce = config.get("communication_data_type")
    zero = ZeroConfig.of(config["zero_optimization"]["stage"], communication_data_type=DType(reduce) if reduce else None)
    workload = Workload.of(
        micro_batch=models.BATCH,
        seq_len=models.LENGTH,
        grad_accum=config["gradient_accumulation_steps"],
    )
    case = Case(load_model(CONFIG), workload, Cluster(gpus=ranks), zero)
    engine.simulate(case, expanded_tape_of(engine, case))
    (recorder,) = recorders
    passing = {row.buffer for row in runtime_buffers(engine.layout(case)) if not row.persistent}
    changes: list[Change] = []
    sizes: list[int] = []
    steps = 0
    labels = recorder.labels_of(recorder.handles)
    for word, value in zip(recorder.code, recorder.value, strict=True):
        op = AllocatorOp(word & ((1 << OP_BITS) - 1))
        if op is AllocatorOp.MARK:
            steps += recorder.marks[value].startswith("step")
        if op not in (AllocatorOp.ALLOC, AllocatorOp.FREE):
            continue
        if op is AllocatorOp.ALLOC:
            sizes.append(value)
        handle, sign = (len(sizes) - 1, 1) if op is AllocatorOp.ALLOC else (value, -1)
        buffer, note = labels[handle]
        if steps == 1 and isinstance(note, str) and buffer in passing:
            changes.append((str(buffer), note, sign * sizes[handle]))
    return changes


@pytest.mark.parametrize(
    ("ranks", "stage", "accum", "reduce"),
    [(1, 0, 2, "bf16"), (2, 1, 1, "bf16"), (2, 1, 2, "bf16"), (2, 2, 2, "fp32"), (2, 3, 1, "fp32")],
)
def test_the_plan_takes_and_gives_in_the_runs_order(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, ranks: int, stage: int, accum: int, reduce: str
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": models.BATCH,
        "gradient_accumulation_steps": accum,
        "bf16": {"enabled": True},
        "communication_data_type": reduce,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage},
        "zeroplan": {"wide_numel": 1 << 14, "audit_steps": 0},
    }
    wanted = planned(config, ranks, monkeypatch)
    assert len(wanted) >= 8
    assert sum(size for _, _, size in wanted) == 0
    for found in pool.run(ranks, recorded, config):
        assert found == wanted
