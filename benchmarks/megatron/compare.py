"""Plans the cases, and holds measured rows against the plans: ``python -m benchmarks.megatron.compare [ROWS.jsonl] [--keep]``.

``--keep`` writes what is planned to ``results/megatron_predicted.json``, before the cases are measured. Rows are compared with
that and with what is planned now.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.megatron.cases import CASES, TWO_GPUS, Case
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

PREDICTED = Path(__file__).parent.parent / "results" / "megatron_predicted.json"
MEASURED = PREDICTED.with_name("megatron.jsonl")
FIGURES = ("allocated", "reserved", "total")
#: GPUs of a node.
_NODE = 8


def figures(case: Case) -> dict[str, Any]:
    """Return what is planned for a case: of its measured pipeline rank where ranks are fake, else of the worst."""
    gpus = min(case.ranks, _NODE)
    request = Ask(
        model=case.model,
        engine="megatron",
        stage=case.stage,
        gpu="H200",
        gpus=gpus,
        nodes=case.ranks // gpus,
        tp=case.tp,
        sp=case.sp,
        pp=case.pp,
        vpp=case.vpp,
        ep=case.ep,
        micro_batch=case.micro_batch,
        seq_len=case.seq_len,
        grad_accum=case.grad_accum,
        dtype="bf16",
    )
    plan = estimate_report(request).plans[0]
    if case.pp > 1 and case in CASES:
        (stage,) = (one for one in plan.stages if one.stage == case.pp_rank)
        return {"allocated": stage.peak_allocated, "reserved": stage.peak_reserved}
    gpu = plan.gpu
    found = {"allocated": gpu.peak_allocated, "reserved": gpu.peak_reserved}
    return found | ({} if case in CASES else {"total": gpu.total})


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", type=Path, nargs="?", default=MEASURED)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    planned = {case.id: figures(case) for case in (*CASES, *TWO_GPUS)}
    if asked.keep:
        content = {"made_by": "python -m benchmarks.megatron.compare --keep", "predictions": planned}
        PREDICTED.write_text(json.dumps(content, indent=1) + "\n")
    rows = [json.loads(line) for line in asked.rows.read_text().splitlines()] if asked.rows.exists() else []
    measured = {row["id"]: row for row in rows}
    before = json.loads(PREDICTED.read_text())["predictions"]
    for case in (*CASES, *TWO_GPUS):
        row = measured.get(case.id, {"fault": "not measured"})
        parts = [_text(name, planned[case.id], before.get(case.id, {}), row) for name in FIGURES if name in planned[case.id]]
        print(case.id, *parts, row.get("fault", ""))


def _text(name: str, planned: dict[str, int], before: dict[str, int], row: dict[str, Any]) -> str:
    text = f"{name} {planned[name] / 2**20:.1f}"
    if name not in row:
        return text
    told = before.get(name)
    blind = f" ({told / row[name] - 1:+.2%} before)" if told else ""
    return f"{text} / {row[name] / 2**20:.1f} MiB {planned[name] / row[name] - 1:+.2%}{blind}"


if __name__ == "__main__":
    main()
