"""Measures the cases: ``python -m benchmarks.megatron.measure ROWS.jsonl [--two-gpus] [--only RE] [--tiny]``.

Needs ``megatron-core`` 0.16.1 and a GPU; neither Apex nor TransformerEngine. Model, buffers, optimizer and schedules are
Megatron-Core's own. Stand-ins, each with the tensors of what it stands for: torch's norms for Apex's, which alone take
sequence parallelism, and torch's fused AdamW for TransformerEngine's. On one GPU the other ranks are those of torch's fake
process group, whose collectives return at once.

``--tiny`` shrinks the models, so that the program can be tried on a CPU, without figures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measured_cases import measure_cases
from benchmarks.megatron.cases import CASES, TWO_GPUS, Case

SECONDS = 180.0


def _tiny(case: Case) -> Case:
    small = {"hidden_size": 128, "ffn_hidden_size": 256, "vocab_size": 512}
    return replace(case, model=case.model | small, seq_len=64)


def measure(case: Case, rank: int, *, fake: bool, histories: Path | None = None) -> dict[str, Any]:
    """Run a case on one of its ranks. Megatron-Core is imported here: its import asks for GPUs, after which no fork has one."""
    from benchmarks.measure import history
    from benchmarks.megatron.run import run_case

    if histories is None:
        return run_case(case, rank, fake=fake)
    history.start(cpp_stacks=False)
    row = run_case(case, rank, fake=fake)
    history.write(history.collect(row["marks"], {"case": case.to_dict()}), histories / f"{case.id}-{case.place}.json.gz")
    return row


if __name__ == "__main__":
    measure_cases(__doc__ or "", CASES, TWO_GPUS, measure, tiny=_tiny, seconds=SECONDS)
