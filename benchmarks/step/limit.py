r"""Where a step's time goes beside its matrix products and attention: by kind of kernel and by gap, and how little it could be.

    python -m benchmarks.step.limit --ranks 2 --out limit.jsonl [--shape llama-1b] [--micros 1,4,8] [--cases zeroplan:3+compile]

Each case runs in fresh processes: first the products and the attention by themselves at the card's own rate and a large copy,
then timed steps, then a few under ``torch.profiler``, whose kernels share out the time between the first and the last: a moment
belongs to products, else to attention, else to another kernel, else to communication that nothing hides, else to a gap. Gaps
are named by the kinds on either side. `limit_ms` is what :mod:`benchmarks.step.bounds` says the step cannot do without.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.forked import failure, run_ranks
from benchmarks.measure.worker import versions
from benchmarks.step.bounds import copy_rate, least_bytes, least_products
from benchmarks.step.case import Case
from benchmarks.step.timing import batch, command, join, timed, warm

PRODUCTS, ATTENTION, COMMUNICATION, GAP = "products", "attention", "communication not hidden", "gap"
#: Words in the names of kernels, in the order in which they decide; names of fused kernels list the operations in them.
_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("nccl", "memcpy ptop")),  # copy engines', too
    (ATTENTION, ("flash", "fmha", "sdpa", "dot_do_o", "convert_dq")),  # the last two of cuDNN's backward
    (PRODUCTS, ("gemm", "nvjet", "xmma", "cutlass", "splitkreduce")),
    ("loss", ("zp_cross_entropy", "cross_entropy", "nll_loss", "softmax")),
    ("optimizer", ("zp_adam", "zp_lion", "zp_sgd", "zp_lamb", "adam")),
    ("gradient norm", ("zp_sum_of_squares", "zp_finalize", "lpnorm")),
    ("8-bit casts", ("float8", "fp8", "bitwise_and", "linalg_vector_norm")),  # scales are found by these two
    ("swiglu", ("silu", "sigmoid")),
    ("rotary", ("_cat_", "_neg_", "_cos", "_sin", "catarray")),
    ("norms, residuals", ("rsqrt", "_pow_", "layer_norm", "_mean_")),
    ("embedding", ("embedding", "indexselect", "gather", "scatter", "index_put", "indexing")),
    ("casts for gathers", ("zp_cast", "bfloat16_copy_kernel")),
    ("copies", ("memcpy", "direct_copy", "copy_kernel", "_clone_")),
    ("fills", ("memset", "fillfunctor", "fill_")),
)
#: Whose moment it is where several kernels run.
_FIRST = (PRODUCTS, ATTENTION)
_STEPS = 3


class Kernel(NamedTuple):
    """One kernel of a trace, in microseconds."""

    name: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    low = name.lower()
    for kind, words in _WORDS:
        if any(word in low for word in words):
            return kind
    return "fused, other" if low.startswith("triton_") else "other"


def shares(kernels: list[Kernel]) -> dict[str, Any]:
    """Share out the time from the first kernel's begin to the last one's end.

    Returns:
        ``ms`` by kind, whose sum is the whole; ``busy_ms`` by kind, which overlap; ``hides_ms``: of communication, by the kind
        beside which it runs; ``kernels``, how many; ``gaps``: of a pair of kinds the milliseconds and number of gaps between
        them, the longest first; ``names``: the kernels that took longest.
    """
    edges = sorted((at, order, n) for n, k in enumerate(kernels) for at, order in ((k.begin, 1), (k.end, 0)))
    kinds = [kind_of(k.name) for k in kernels]
    running: Counter[str] = Counter()
    exclusive, hides = defaultdict[str, float](float), defaultdict[str, float](float)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    last_at, last_kind = edges[0][0], kinds[edges[0][2]]
    for at, order, n in edges:
        if at > last_at:
            whose = _whose(running)
            exclusive[whose] += at - last_at
            if running["communication"] and whose != COMMUNICATION:
                hides[whose] += at - last_at
            if whose == GAP:
                gaps[last_kind, kinds[n]].append(at - last_at)
        running[kinds[n]] += 1 if order else -1
        last_kind = last_kind if order else kinds[n]
        last_at = at
    busy: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    for kernel, kind in zip(kernels, kinds, strict=True):
        busy[kind] += kernel.end - kernel.begin
        names[kernel.name].append(kernel.end - kernel.begin)
    largest = sorted(names.items(), key=lambda item: -sum(item[1]))[:40]
    between = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:12]
    return {
        "ms": {kind: us / 1e3 for kind, us in sorted(exclusive.items(), key=lambda item: -item[1])},
        "busy_ms": {kind: us / 1e3 for kind, us in busy.items()},
        "hides_ms": {kind: us / 1e3 for kind, us in hides.items()},
        "kernels": dict(Counter(kinds)),
        "gaps": [[*pair, sum(us) / 1e3, len(us), max(us) / 1e3] for pair, us in between],
        "names": [[kind_of(name), name[:110], sum(us) / 1e3, len(us)] for name, us in largest],
    }


def _whose(running: Counter[str]) -> str:
    there = [kind for kind, count in running.items() if count > 0]
    for kind in _FIRST:
        if kind in there:
            return kind
    computing = [kind for kind in there if kind != "communication"]
    if computing:
        return min(computing)
    return COMMUNICATION if there else GAP


def _a_step(found: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the shares of one step of `steps`."""
    return {
        **{key: {kind: round(ms / steps, 3) for kind, ms in found[key].items()} for key in ("ms", "busy_ms", "hides_ms")},
        "kernels": {kind: round(count / steps) for kind, count in found["kernels"].items()},
        "gaps": [
            [before, after, round(ms / steps, 3), round(count / steps, 1), round(most, 3)]
            for before, after, ms, count, most in found["gaps"]
        ],
        "names": [[kind, name, round(ms / steps, 3), round(count / steps, 1)] for kind, name, ms, count in found["names"]],
    }


def measured(case: Case, micro: int, arguments: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Run one rank of one case."""
    import torch

    from benchmarks.step.engines import build

    arguments.micro = micro
    device = join(rank)
    cuda = device.type == "cuda"
    found: dict[str, Any] = {"copy_gb_per_s": round(copy_rate(device) / 1e9, 1)}
    found["alone"] = least_products(
        arguments.shape, micro, arguments.seq, device, checkpointing=case.checkpointing, within=case.within
    )
    step, _keep = build(case, arguments.shape, micro, device)
    found |= timed(step, arguments, rank, device)
    tokens = batch(0, rank, arguments).to(device)
    activities = [torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
    step(tokens)
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(_STEPS):
            step(tokens)
        if cuda:
            torch.cuda.synchronize()
    on_device = "CUDA" if cuda else "CPU"
    kernels = [
        Kernel(e.name, e.time_range.start, e.time_range.end)
        for e in seen.events()
        if str(e.device_type).endswith(on_device) and e.time_range.elapsed_us() > 0
    ]
    found["step"] = _a_step(shares(kernels), _STEPS)
    return found


def summary(case: Case, micro: int, arguments: argparse.Namespace, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one case: the slowest rank's, with the bounds beside its shares."""
    row = max(ranks, key=lambda found: float(found["step_ms"]))
    least = least_bytes(
        arguments.shape, micro, arguments.seq, ranks=arguments.ranks, checkpointing=case.checkpointing, stage=case.stage
    )
    rate = row["copy_gb_per_s"] * 1e6
    bounds = {kind: round(count / rate, 3) for kind, count in least.items()}
    alone = row["alone"]["products_ms"] + row["alone"]["attention_ms"]
    limit = alone + sum(bounds.values())
    return row | {
        "bound_ms": bounds,
        "limit_ms": round(limit, 3),
        "step_over_products": round(row["step_ms"] / alone, 3),
        "step_over_limit": round(row["step_ms"] / limit, 3),
    }


def lines(row: dict[str, Any]) -> list[str]:
    """Write one row as a table: each kind's milliseconds of a step, and the least."""
    alone, step = row["alone"], row["step"]
    least = {PRODUCTS: alone["products_ms"], ATTENTION: alone["attention_ms"], **row["bound_ms"]}
    out = [
        f"{row['shape']} {row['case']} micro batch {row['micro']}, {row['ranks']} × {row['gpu']}: step {row['step_ms']:.1f} ms,"
        f" products and attention alone {least[PRODUCTS] + least[ATTENTION]:.1f} ms ({alone['tflops']:.0f} TFLOP/s), "
        f"step over products {row['step_over_products']:.2f}; limit {row['limit_ms']:.1f} ms, step over it "
        f"{row['step_over_limit']:.2f}",
        f"  {'kind':26} {'ms':>8} {'least':>8} {'kernels':>8}",
    ]
    for kind in [*step["ms"], *(kind for kind in least if kind not in step["ms"])]:
        bound = f"{least[kind]:8.2f}" if kind in least else f"{'':8}"
        out.append(f"  {kind:26} {step['ms'].get(kind, 0.0):8.2f} {bound} {step['kernels'].get(kind, 0):8}")
    out += [f"  gap {a} → {b}: {ms:.2f} ms in {count:g}, longest {most:.2f}" for a, b, ms, count, most in step["gaps"][:6]]
    return out


def main() -> int:
    """Run every case; add a row a case to the file, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--micros", default="1,4,8")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cases", default="zeroplan:3+compile")
    parser.add_argument("--timeout", type=float, default=150)
    arguments = parser.parse_args()
    warm(arguments.cases)
    common = {"ranks": arguments.ranks, "shape": arguments.shape, "seq": arguments.seq}
    common |= {"versions": versions(), "command": command("benchmarks.step.limit")}
    common["nccl"] = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    faults = 0
    for micro in map(int, arguments.micros.split(",")):
        for case in map(Case.parse, arguments.cases.split(",")):
            found = run_ranks(partial(measured, case, micro, arguments), arguments.ranks, timeout=arguments.timeout)
            fault = failure(found)
            row: dict[str, Any] = {"case": str(case), "micro": micro, **common}
            row |= {"fault": fault} if fault else summary(case, micro, arguments, [f["value"] for f in found])
            faults += fault is not None
            with arguments.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print("\n".join([f"{case} {micro}: {fault}"] if fault else lines(row)), flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
