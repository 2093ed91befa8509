"""DeepSpeed's Muon: what each rank keeps between steps equals what DeepSpeed 0.19.8 kept on 1 to 3 CPU ranks, to the byte.

``measured_muon.json`` was made by run_muon_on_cpu.py, whose model is the one below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.buffers import Buffer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.rank import DeepSpeedRank, deepspeed_rank

ROWS = json.loads((Path(__file__).parent / "measured_muon.json").read_text())
_STATES = {"momentum_buffer": Buffer.OPTIM_MOMENTUM, "exp_avg": Buffer.OPTIM_EXP_AVG, "exp_avg_sq": Buffer.OPTIM_EXP_AVG_SQ}


def _parameters() -> Parameters:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (64, 96)}
    for i in range(3):
        shapes |= {f"layers.{i}.weight": (64, 64), f"layers.{i}.bias": (64,)}
    shapes["last.weight"] = (40, 64)
    count = len(shapes)
    return Parameters(
        names=tuple(shapes),
        shapes=tuple(shapes.values()),
        trainable=(True,) * count,
        autocast=(True,) * count,
        blocks=("",) * count,
        modules=tuple((p,) for p in range(count)),
    )


def _rank(row: dict[str, Any]) -> DeepSpeedRank:
    stage, dtype, *more = row["case"].split()
    knobs: dict[str, Any] = {"reduce_scatter": False} if stage == "3" else {}
    if "accum" in more:
        knobs["grad_accum_dtype"] = DType.FP32
    zero = ZeroConfig.of(int(stage), "cpu" if "offload" in more else "none", **knobs)
    precision = Precision.FP32 if dtype == "fp32" else Precision.MIXED
    workload = Workload.of(dtype=DType(dtype), precision=precision, optimizer="muon", optimizer_kind=OptimizerKind.FOREACH)
    return deepspeed_rank(_parameters(), workload, zero, ParallelLayout(row["ranks"]), rank=row["rank"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['case']}, rank {row['rank']} of {row['ranks']}")
def test_a_rank_keeps_what_deepspeed_keeps(row: dict[str, Any]) -> None:
    rank = _rank(row)
    kept = {key: sum(numel * width for numel, width in sizes) for key, sizes in row["kept"].items()}
    states = [state for at in range(len(rank.stepped_at_once)) for state in rank.states(at)]
    for key, buffer in _STATES.items():
        assert sum(nbytes for one, nbytes in states if one is buffer) == kept[key], key
    assert rank.momentum_bytes * rank.momentum == kept["staged"]
    assert rank.muon_gathers == kept["gathers"]
