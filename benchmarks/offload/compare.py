r"""Tokens a second and memory with offload, beside DeepSpeed's and beside what the machine allows.

    python3 -m benchmarks.offload.compare --out results.jsonl [--ranks 1] [--shape llama-1b] [--micro 1] [--seq 2048] \
        [--cases zeroplan:2:opt,deepspeed:2:opt,…] [--nvme FOLDER]

Each case (see :mod:`benchmarks.offload.case`) runs in fresh processes on the same batches, as in
:mod:`benchmarks.step.compare`, whose check of the losses decides which ratios count. First one process measures the limits
(:mod:`benchmarks.offload.limits`); each row then has its step's time as a multiple of the least that they allow. Host memory
is the sum of the ranks' peak resident memory, pinned included.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.forked import failure, run_ranks
from benchmarks.measure.worker import versions
from benchmarks.offload.case import OffloadCase
from benchmarks.step.compare import TOLERANCE, summary
from benchmarks.step.timing import batch, command, join, timed, warm

DEFAULT_CASES = (
    "zeroplan:2:none,zeroplan:1:opt,deepspeed:1:opt,zeroplan:2:opt,deepspeed:2:opt,zeroplan:3:opt,deepspeed:3:opt,"
    "zeroplan:3:all,deepspeed:3:all,zeroplan:2:opt+free,deepspeed:2:opt+free,zeroplan:2:opt+delayed"
)


def measure_limits(arguments: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Measure the machine's rates, the least times of this model's transfers and update, and its forward and backward."""
    import torch

    from benchmarks.offload.limits import Limits, forward_and_backward
    from benchmarks.step.model import model_of

    device = join(rank)
    limits = Limits.measure(device, arguments.probe_bytes)
    found: dict[str, Any] = {"memory": limits.memory, "down": limits.down, "up": limits.up}
    model = model_of(arguments.shape, torch.bfloat16, device, checkpointing="+ckpt" in arguments.cases)
    params = sum(p.numel() for p in model.parameters())
    tokens = [batch(n, rank, arguments).to(device) for n in range(arguments.steps)]
    compute = forward_and_backward(model, tokens)
    return found | {"params": params, "seconds": limits.seconds(params // arguments.ranks), "compute": compute}


def run_case(case: OffloadCase, arguments: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Run one rank of one case; returns losses of the first steps, the median step, peaks on the device and the host."""
    from benchmarks.step.engines import build

    device = join(rank)
    before = _resident("VmRSS")
    step, keep = build(case, arguments.shape, arguments.micro, device)
    found = timed(step, arguments, rank, device, finish=keep.drain if case.engine == "zeroplan" else None)
    return found | {"host_peak": _resident("VmHWM"), "host_before": before}


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


def table(rows: list[dict[str, Any]], limits: dict[str, Any] | None) -> list[str]:
    """Write a line a case: speed, memory on device and host, the step over its bound, and the ratios to DeepSpeed's."""
    from benchmarks.offload.limits import bound

    good = {row["case"]: row for row in rows if "fault" not in row}
    lines = []
    for name, row in good.items():
        case = OffloadCase.parse(name)
        parts = [f"{name:26} {row['step_ms']:9.2f} ms {row['tokens_per_s']:8} tok/s"]
        parts.append(f"{row.get('peak_reserved', 0) / 1e9:7.2f} GB GPU {row['host_peak'] / 1e9:7.2f} GB host")
        if limits is not None and case.what != "none":
            least = bound(limits["seconds"], limits["compute"], waits_for_all=case.waits_for_all)
            parts.append(f"x{row['step_ms'] / 1e3 / least:.2f} of the least")
        peers = [peer for other, peer in good.items() if OffloadCase.parse(other).group == case.group and other != name]
        parts += [_ratio(row, peer) for peer in peers if case.engine == "zeroplan" and peer["case"].startswith("deepspeed")]
        lines.append("  ".join(parts))
    return lines + [f"{row['case']:26} {row['fault']}" for row in rows if "fault" in row]


def _ratio(row: dict[str, Any], peer: dict[str, Any]) -> str:
    apart = max(abs(a - b) for a, b in zip(row["losses"], peer["losses"], strict=True))
    fall = abs(peer["losses"][0] - peer["losses"][-1])
    text = (
        f"deepspeed: x{row['tokens_per_s'] / peer['tokens_per_s']:.2f} tok/s x{row['host_peak'] / peer['host_peak']:.2f} host"
    )
    late = OffloadCase.parse(row["case"]).delayed
    return text if late or apart <= TOLERANCE * fall else f"{text}, does not count: losses differ by {apart:.3f} of {fall:.3f}"


def main() -> int:
    """Measure the limits, run every case, print each row as it comes, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cases", default=DEFAULT_CASES)
    parser.add_argument("--nvme", default="", help="a folder on a disk, for cases with states in files")
    parser.add_argument("--probe-bytes", type=int, default=1 << 30, help="bytes of one copy when rates are measured")
    parser.add_argument("--timeout", type=float, default=240)
    arguments = parser.parse_args()
    warm(arguments.cases)
    common = {"ranks": arguments.ranks, "shape": arguments.shape, "micro": arguments.micro, "seq": arguments.seq}
    common |= {"versions": versions(), "command": command("benchmarks.offload.compare")}
    found = run_ranks(partial(measure_limits, arguments), arguments.ranks, timeout=arguments.timeout)
    limits = None if failure(found) else found[0]["value"]
    print(json.dumps({"limits": limits or failure(found)}), flush=True)
    rows = []
    for text in arguments.cases.split(","):
        case = OffloadCase.parse(text, arguments.nvme)
        found = run_ranks(partial(run_case, case, arguments), arguments.ranks, timeout=arguments.timeout)
        fault = failure(found)
        row: dict[str, Any] = {"case": str(case)}
        if fault:
            row["fault"] = fault
        else:
            values = [one["value"] for one in found]
            row |= summary(case, arguments, values)
            row["host_peak"] = sum(value["host_peak"] for value in values)
            row["host_before"] = sum(value["host_before"] for value in values)
        rows.append(row | common | {"limits": limits})
        with arguments.out.open("a") as out:
            out.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps(row), flush=True)
    print("\n".join(table(rows, limits)))
    return int(any("fault" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
