"""The plan of every owned buffer equals what the Arena measured, to the byte: 1 to 4 gloo ranks, every stage and precision.

The model has odd sizes throughout; the plan starts from its spec, the measurement from the live module on each rank.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ADAMW, ds_config, train_all
from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import OffloadDevice, OffloadOptimizer, OffloadParam, ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.engines.case import Case
from zeroplan.engines.runtime.engine import Runtime
from zeroplan.ledger.line import evaluate
from zeroplan.models.live import spec_from_module

pytestmark = pytest.mark.torch

STAGES = (0, 1, 2, 3)
#: Buffers of the ledger that are not the Arena's: torch makes them, or the pages of files.
NOT_OF_THE_ARENA = (Buffer.INIT_TEMP, Buffer.WORKSPACE, Buffer.FRAGMENTATION)


#: Stages and types of optimizers that exchange signs.
ONE_BIT = ((0, "OneBitAdam"), (1, "OneBitAdam"), (0, "ZeroOneAdam"))

Rows = dict[tuple[str, str, str], int]
Totals = dict[tuple[str, str], int]


def plan_rows(config: dict[str, Any], model: dict[str, Any], ranks: int) -> tuple[Rows, Totals]:
    """Bytes by buffer, unit and place, and the ledger's by buffer and place."""
    engine = Runtime().with_ds_config(read_ds_config(config, dialect=Dialect.RUNTIME))
    dtype = next((DType(name) for name in ("bf16", "fp16") if name in config), DType.FP32)
    accum = config.get("data_types", {}).get("grad_accum_dtype")
    section = config["zero_optimization"]
    optimizer = OffloadOptimizer(
        OffloadDevice(section.get("offload_optimizer", {}).get("device", "none")),
        ratio=section.get("offload_optimizer", {}).get("ratio", 1.0),
        nvme_path=section.get("offload_optimizer", {}).get("nvme_path"),
    )
    said = section.get("offload_param", {})
    param = OffloadParam(**{**said, "device": OffloadDevice(said.get("device", "none"))})
    zero = ZeroConfig.of(section["stage"], optimizer, param, grad_accum_dtype=DType(accum) if accum else None)
    workload = Workload.of(
        micro_batch=models.BATCH,
        seq_len=models.LENGTH,
        grad_accum=config.get("gradient_accumulation_steps", 1),
        dtype=dtype,
        precision=Precision.FP32 if dtype is DType.FP32 else Precision.MIXED,
        optimizer=config["optimizer"]["type"].lower(),
    )
    case = Case(spec_from_module(models.make(**model)), workload, Cluster(gpus=ranks), zero)
    rows = dict(engine.owned_buffers(case, None).rows)
    totals: Counter[tuple[str, str]] = Counter()
    for item in evaluate(*engine.ledger(case)):
        if item.buffer not in NOT_OF_THE_ARENA:
            totals[item.buffer.value, item.place.value] += item.bytes
    return rows, dict(totals)


def hold(config: dict[str, Any], model: dict[str, Any], ranks: int, measured: list[dict[str, Any]]) -> None:
    """Every rank's Arena has the plan's rows and no other: all at their peak, and gradients only within a step."""
    rows, totals = plan_rows(config, model, ranks)
    for rank, result in enumerate(measured):
        what = f"{ranks} ranks, rank {rank}, {config}"
        assert {(row["buffer"], row["unit"], row["place"]): row["peak"] for row in result["rows"]} == rows, what
        for row in result["rows"]:
            if "delayed_update" in config["zeroplan"] and row["place"] == "hbm":
                continue  # slots go in the next forward, so that it need not wait for the last gradients to leave
            temporary = row["buffer"].startswith(("grad.", "comm.", "stage.")) and row["buffer"] != "comm.all_reduce"
            passing = row["place"] == "hbm" and temporary
            assert row["bytes"] == (0 if passing else row["peak"]), what
        sums: Counter[tuple[str, str]] = Counter()
        for row in result["rows"]:
            sums[row["buffer"], row["place"]] += row["peak"]
        assert dict(sums) == totals, what


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3, 4))])
def test_every_stage_and_precision(pool: RankPool, ranks: int) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (ds_config(stage, dtype), {"tied": stage % 2 == 1}) for stage in STAGES for dtype in ("bf16", "fp32", "fp16")
    ]
    cases += [(ds_config(stage, "bf16", optimizer={"type": "LAMB"}), {}) for stage in STAGES]
    cases += [(ds_config(stage, "bf16", optimizer={"type": kind}), {}) for stage, kind in ONE_BIT]
    if ranks == 2:  # each stage and each precision by itself, LAMB where it is sharded least and most; other ranks have all
        cases = [cases[index] for index in (1, 5, 6, 9, 11, 13, 15, 17)]
    results = pool.run(ranks, train_all, cases, 2)
    for index, (config, model) in enumerate(cases):
        hold(config, model, ranks, [rank[index] for rank in results])


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_offload(pool: RankPool, ranks: int) -> None:
    def offloaded(stage: int, dtype: str, *, ratio: float = 1.0, param: str = "none", **changes: Any) -> dict[str, Any]:
        optimizer = {"device": "cpu", "ratio": ratio}
        section = {"stage": stage, "offload_optimizer": optimizer, "offload_param": {"device": param}}
        return {**ds_config(stage, dtype, **changes), "zero_optimization": section}

    wide = {"gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "fp32"}}
    configs = [offloaded(stage, dtype) for stage in (1, 2, 3) for dtype in ("bf16", "fp32")]
    configs += [offloaded(stage, "bf16", ratio=0.5, **wide) for stage in (1, 2, 3)]
    configs += [offloaded(3, dtype, param="cpu", **wide) for dtype in ("bf16", "fp32")]
    configs += [
        offloaded(2, "bf16", zeroplan={"delayed_update": 1}),
        offloaded(2, "bf16", **wide, zeroplan={"delayed_update": 1}),
    ]
    if ranks == 3:  # each stage in one precision; one rank has all
        configs = [configs[index] for index in (0, 3, 4, 6, 7, 8, 9, 11)]
    results = pool.run(ranks, train_all, [(config, {"tied": True}) for config in configs], 2)
    for index, config in enumerate(configs):
        hold(config, {"tied": True}, ranks, [rank[index] for rank in results])


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_files(pool: RankPool, tmp_path: Path, ranks: int) -> None:
    def in_files(optimizer: str, dtype: str, kind: str = "AdamW", **keys: Any) -> dict[str, Any]:
        config = ds_config(3, dtype, optimizer={"type": kind, "params": {"lr": 1e-3}}, zeroplan={"nvme_in_memory": True})
        disk = {"device": "nvme", "nvme_path": str(tmp_path)}
        states = disk if optimizer == "nvme" else {"device": optimizer}
        section = {"stage": 3, "offload_optimizer": states, "offload_param": {**disk, "max_in_cpu": 0, **keys}}
        return {**config, "zero_optimization": section}

    configs = [in_files(optimizer, dtype) for optimizer in ("cpu", "nvme") for dtype in ("bf16", "fp32")]
    configs += [in_files("nvme", "bf16", buffer_size=4096, buffer_count=2), in_files("cpu", "bf16", max_in_cpu=4000)]
    configs += [in_files("nvme", "bf16", "SGD", max_in_cpu=4000)]
    results = pool.run(ranks, train_all, [(config, {"tied": True}) for config in configs], 2)
    for index, config in enumerate(configs):
        hold(config, {"tied": True}, ranks, [rank[index] for rank in results])
    places = {row["place"] for row in results[0][5]["rows"] if row["buffer"] == "param.shard"}
    assert places == {"pinned", "nvme"}


def test_other_optimizers_rings_and_accumulation(pool: RankPool) -> None:
    lion = {"type": "Lion", "params": {"lr": 1e-3}}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (ds_config(3, "bf16", optimizer=lion), {}),
        (ds_config(3, "bf16", zeroplan={"ring": 4}), {}),
        (ds_config(2, "bf16", gradient_accumulation_steps=2, data_types={"grad_accum_dtype": "fp32"}), {}),
        (ds_config(1, "bf16", gradient_accumulation_steps=2, data_types={"grad_accum_dtype": "fp32"}), {"unused": True}),
        (ds_config(3, "fp32", zeroplan={"wide_numel": 1 << 20}), {"depth": 2}),
        (ds_config(2, "bf16", optimizer={**ADAMW, "type": "Lamb", "params": {"lr": 1e-3}}), {}),
    ]
    results = pool.run(3, train_all, cases, 2)
    for index, (config, model) in enumerate(cases):
        hold(config, model, 3, [rank[index] for rank in results])
