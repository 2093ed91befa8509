r"""Step time and peak memory of the runtime beside DeepSpeed, FSDP2 and DDP, after a check that all train alike.

    python3 -m benchmarks.step.compare --ranks 2 --out results.jsonl [--shape llama-1b] [--micro 1] [--seq 2048] \
        [--cases zeroplan:3,fsdp2:3,deepspeed:3,…] [--profile zeroplan:3]

Each case (see :mod:`benchmarks.step.case`) runs in fresh processes on the same batches. Times are medians over steps between
device events, on the slowest rank; memory is the worst rank's, over training. The first steps repeat one batch; a ratio
counts only if the losses, which fall there, are the peer's within :data:`TOLERANCE` of that fall.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.forked import failure, run_ranks
from benchmarks.measure.worker import versions
from benchmarks.step.case import Case
from benchmarks.step.timing import batch, command, join, timed, warm

#: Largest difference of two engines' losses, as a part of their fall over the first steps: they round in other places, but
#: a gradient scaled, clipped or applied wrongly changes the fall itself.
TOLERANCE = 0.1

DEFAULT_CASES = (
    "zeroplan:1,deepspeed:1,ddp:1,zeroplan:2,deepspeed:2,fsdp2:2,zeroplan:3,deepspeed:3,fsdp2:3,"
    "zeroplan:1+r32,ddp:1+r32,zeroplan:2+r32,deepspeed:2+r32,fsdp2:2+r32,zeroplan:3+r32,fsdp2:3+r32"
)


def run_case(case: Case, arguments: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Run one rank of one case; returns losses of the first steps, the median step, peaks."""
    from benchmarks.step.engines import build
    from benchmarks.step.overlap import profile_step

    device = join(rank)
    step, _keep = build(case, arguments.shape, arguments.micro, device)
    found = timed(step, arguments, rank, device)
    if device.type == "cuda" and str(case) in arguments.profile.split(","):
        trace = arguments.out.with_suffix(f".{case}.trace.json") if rank == 0 and arguments.traces else None
        tokens = batch(0, rank, arguments).to(device)
        found |= profile_step(lambda: step(tokens), trace)
    return found


def summary(case: Case, arguments: argparse.Namespace, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one case: the slowest rank's step, the worst rank's peaks, the losses averaged over the ranks."""
    row: dict[str, Any] = {key: max(found[key] for found in ranks) for key in ranks[0] if key not in ("losses", "gpu")}
    row["tokens_per_s"] = round(arguments.micro * arguments.seq * len(ranks) / row["step_ms"] * 1e3)
    row["losses"] = [round(statistics.fmean(losses), 5) for losses in zip(*(found["losses"] for found in ranks), strict=True)]
    row["gpu"] = ranks[0]["gpu"]
    return row


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Write a line a case: speed and memory, and the runtime's ratios to each peer of its group."""
    lines = []
    good = {str(row["case"]): row for row in rows if "fault" not in row}
    for name, row in good.items():
        case = Case.parse(name)
        peers = [peer for other, peer in good.items() if case.is_beside(Case.parse(other))]
        ratios = [_ratio(row, peer) for peer in peers] if case.engine == "zeroplan" else []
        peaks = f"{row.get('peak_allocated', 0) / 1e9:7.2f} {row.get('peak_reserved', 0) / 1e9:7.2f} GB"
        lines.append(f"{name:24} {row['step_ms']:9.2f} ms {row['tokens_per_s']:8} tok/s {peaks}  {'; '.join(ratios)}")
    return lines + [f"{row['case']:24} {row['fault']}" for row in rows if "fault" in row]


def _ratio(row: dict[str, Any], peer: dict[str, Any]) -> str:
    apart = max(abs(a - b) for a, b in zip(row["losses"], peer["losses"], strict=True))
    fall = abs(peer["losses"][0] - peer["losses"][-1])
    parts = [f"{Case.parse(peer['case']).label}: x{row['tokens_per_s'] / peer['tokens_per_s']:.2f} tok/s"]
    if "peak_reserved" in peer:
        parts.append(f"x{row['peak_reserved'] / peer['peak_reserved']:.2f} reserved")
    if apart > TOLERANCE * fall:
        parts.append(f"does not count, losses differ by {apart:.3f} in a fall of {fall:.3f}")
    return " ".join(parts)


def main() -> int:
    """Run every case; print each row as it comes, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--gpus", type=lambda text: [int(n) for n in text.split(",")], help="devices to use, as in 2,3")
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cases", default=DEFAULT_CASES)
    parser.add_argument("--profile", default="", help="cases of which one more step is profiled")
    parser.add_argument("--traces", action="store_true", help="write the profiled steps as Chrome traces, too")
    parser.add_argument("--timeout", type=float, default=180)
    arguments = parser.parse_args()
    warm(arguments.cases)
    common = {"ranks": arguments.ranks, "shape": arguments.shape, "micro": arguments.micro, "seq": arguments.seq}
    common |= {"versions": versions(), "command": command("benchmarks.step.compare")}
    rows = []
    for case in map(Case.parse, arguments.cases.split(",")):
        found = run_ranks(partial(run_case, case, arguments), arguments.ranks, timeout=arguments.timeout, gpus=arguments.gpus)
        fault = failure(found)
        row = {"case": str(case), **({"fault": fault} if fault else summary(case, arguments, [f["value"] for f in found]))}
        rows.append(row | common)
        with arguments.out.open("a") as out:
            out.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps(row), flush=True)
    print("\n".join(table(rows)))
    return int(any("fault" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
