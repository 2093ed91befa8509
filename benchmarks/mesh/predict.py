"""Predictions of the cases: ``python -m benchmarks.mesh.predict [--only RE]``. Kept before they are measured."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.mesh.cases import CASES, TWO_GPUS, Case
from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.plan import MemoryPlan
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

PREDICTED = Path(__file__).parent.parent / "results" / "mesh_predicted.json"
#: GPUs of a node; a case with more ranks has several nodes.
NODE = 8
#: What a run is held against.
FIGURES = ("allocated", "reserved", "total", "owned")
#: First parts of the names of what the runtime itself allocates; tokens that ranks exchange are torch's.
OWN = ("param", "grad", "optim", "comm", "stage")


def main() -> None:
    """Predict the cases and keep the figures, those of other cases as they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    kept = json.loads(PREDICTED.read_text())["predictions"] if PREDICTED.exists() else {}
    for case in (*CASES, *TWO_GPUS):
        if re.search(only, case.id):
            kept[case.id] = figures(plan_of(case), case)
            print(
                case.id,
                *(f"{name} {kept[case.id][name] / 2**20:.1f}" for name in FIGURES if kept[case.id].get(name)),
                flush=True,
            )
    content = {"made_by": "python -m benchmarks.mesh.predict, before the cases were measured", "predictions": kept}
    PREDICTED.write_text(json.dumps(content, indent=1) + "\n")


def plan_of(case: Case) -> MemoryPlan:
    """Return the plan of one case."""
    return estimate_report(request_of(case)).plans[0]  # of a pipeline, `stages` has the others


def request_of(case: Case) -> Ask:
    """Return the request that describes a case, on H200 GPUs."""
    gpus = min(case.ranks, NODE)
    return Ask(
        model=case.model,
        engine=case.engine,
        stage=case.stage,
        gpu="H200",
        gpus=gpus,
        nodes=case.ranks // gpus,
        tp=case.tp,
        sp=case.sp,
        cp=case.cp,
        ep=case.ep,
        pp=case.pp,
        vpp=case.vpp,
        dp_replicate=case.dp_replicate,
        schedule=case.schedule,
        micro_batch=case.micro_batch,
        seq_len=case.seq_len,
        grad_accum=case.grad_accum,
        gradient_checkpointing=case.checkpointing,
        alloc_conf=case.alloc_conf,
        depth="simulated",
    )


def figures(plan: MemoryPlan, case: Case) -> dict[str, Any]:
    """The figures that a run is held against, in bytes; of a pipeline those of the measured stage.

    `owned` is what the runtime's Arena holds at most, on the worst rank.
    """
    found: dict[str, Any] = {}
    if case.engine == "zeroplan":
        own = (line for line in plan.lines if line.buffer.split(".")[0] in OWN and line.buffer != Buffer.COMM_ACTIVATION)
        found["owned"] = sum(line.bytes for line in own if line.place == Place.HBM)
    for stage in plan.stages:
        if stage.stage == case.pp_rank:
            return {"allocated": stage.peak_allocated, "reserved": stage.peak_reserved, "total": stage.total} | found
    gpu = plan.gpu
    return {"allocated": gpu.peak_allocated, "reserved": gpu.peak_reserved, "total": gpu.total, "phases": gpu.phases} | found


if __name__ == "__main__":
    main()
