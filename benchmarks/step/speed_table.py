r"""The runtime compiled beside FSDP2 in its best form, one case a call, so that a table can be made in pieces.

    python3 -m benchmarks.step.speed_table --out speed_2.jsonl --ranks 2 [--only llama-1b] [--all]

A call runs the first case of the list that the file has no row of, and adds its row; with ``--all`` it goes on until none is
left. It exits with 3 once nothing is left to run, so ``until [ $? = 3 ]`` loops over it. A case that failed has a row, too:
take that row out of the file to run it again. Each row holds, beside what ``benchmarks.step.compare`` measures, the matrix
products' rate that the same card reached just after (`matmul_tflops`) and MFU against it and against the data sheet: model
FLOPs of PaLM's appendix B, 6 for each active parameter and token and 12 for each pair of tokens, head width and block, without
what checkpointing computes again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.forked import failure, run_ranks
from benchmarks.measure.worker import versions
from benchmarks.step.case import SHAPES, Case
from benchmarks.step.compare import run_case, summary, table
from benchmarks.step.timing import command, warm
from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import find_gpu

EXIT_DONE = 3
_PLAIN, _CHECKPOINTED = "", "+ckpt"
#: The matrix product that shows the card's limit: rows and columns of both factors, and repetitions.
_SIDE, _TIMES = 8192, 20


class Cell(NamedTuple):
    """One case of the table on one shape."""

    shape: str
    micro: int
    case: str


def cells(ranks: int) -> list[Cell]:
    """The cases for so many GPUs, small ones first: ours beside FSDP2's, compiled and not; on one GPU at stage 2."""
    stage, peer = (3, "fsdp2:3") if ranks > 1 else (2, "fsdp2:2")
    grid = [("llama-1b", micro, options) for options in (_PLAIN, _CHECKPOINTED) for micro in (1, 4, 8)]
    grid += [("llama-1b", 4, "+r32")]
    if ranks > 1:
        grid += [(shape, micro, _CHECKPOINTED) for shape in ("qwen3-moe-small", "llama-8b") for micro in (1, 4)]
    return [
        Cell(shape, micro, f"{engine}{options}{compiled}")
        for shape, micro, options in grid
        for engine in (f"zeroplan:{stage}", peer)
        for compiled in (*(["+within"] if options == _CHECKPOINTED else []), "+compile", "")
    ]


def active_flops(shape: str, seq: int) -> int:
    """Model FLOPs of one token, forward and backward."""
    config = SHAPES[shape]
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    attention = hidden * width * (2 * heads + 2 * kv_heads)
    experts = config.get("num_experts", 0)
    mlp = (
        3
        * hidden
        * (config["moe_intermediate_size"] * config["num_experts_per_tok"] if experts else config["intermediate_size"])
    )
    router = hidden * experts
    parameters = layers * (attention + mlp + router) + hidden * config["vocab_size"]
    return int(6 * parameters + 12 * layers * heads * width * seq)


def matmul_tflops(device: Any) -> float:
    """The rate of a large product in bf16 on this card."""
    import torch

    a, b = (torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a @ b
    begin.record()
    for _ in range(_TIMES):
        a @ b
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return round(2 * _SIDE**3 * _TIMES / milliseconds / 1e9, 1)


def run(case: Case, arguments: argparse.Namespace, rank: int) -> dict[str, Any]:
    """One rank of a case, and then its card's limit."""
    import torch

    found = run_case(case, arguments, rank)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        found["matmul_tflops"] = matmul_tflops(torch.device("cuda", rank))
    return found


def with_mfu(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the rate of its model FLOPs, and what part of the card's limits that is."""
    reached = row["tokens_per_s"] / row["ranks"] * active_flops(row["shape"], row["seq"]) / 1e12
    row["model_tflops"] = round(reached, 1)
    if row.get("matmul_tflops"):
        row["of_matmul"] = round(reached / row["matmul_tflops"], 3)
    with contextlib.suppress(BadInput):  # a CPU, or a card without a data sheet here
        row["mfu"] = round(reached / find_gpu(row["gpu"].removeprefix("NVIDIA ")).bf16_tflops, 3)
    return row


def where_it_goes(row: dict[str, Any]) -> str:
    """A line: the rate of model FLOPs beside the card's limits, and what a profiled step's time went to."""
    parts = [f"{row['case']:24} {row['model_tflops']:7.1f} TFLOP/s"]
    if "of_matmul" in row:
        parts.append(f"{row['of_matmul']:.1%} of the {row['matmul_tflops']} of its products")
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.1%}")
    if "computation_ms" in row:
        other = row["computation_ms"] - row["products_ms"] - row["attention_ms"]
        shown = row["communication_ms"] - row["hidden_ms"]
        parts.append(f"products {row['products_ms']} ms, attention {row['attention_ms']}, other kernels {other:.1f}")
        parts.append(f"communication that shows {shown:.1f}, idle {row['idle_ms']}")
    return "; ".join(parts)


def main() -> int:
    """Run the next case, or all that are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", type=lambda text: [int(n) for n in text.split(",")], help="devices to use, as in 2,3")
    parser.add_argument("--only", default="", help="shapes, with commas")
    parser.add_argument("--all", action="store_true", help="go on until no case is left")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=240)
    arguments = parser.parse_args()
    arguments.traces = False
    done = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    known = {(row["shape"], row["micro"], row["case"], row["ranks"]) for row in done}
    wanted = [cell for cell in cells(arguments.ranks) if not arguments.only or cell.shape in arguments.only.split(",")]
    left = [cell for cell in wanted if (*cell, arguments.ranks) not in known]
    if not left:
        for shape, micro in dict.fromkeys((cell.shape, cell.micro) for cell in wanted):
            print(f"{shape}, micro batch {micro}")
            rows = [row for row in done if (row["shape"], row["micro"]) == (shape, micro)]
            print("\n".join([*table(rows), *map(where_it_goes, (row for row in rows if "fault" not in row))]))
        return EXIT_DONE
    warm(",".join(cell.case for cell in left))
    for cell in left if arguments.all else left[:1]:
        arguments.shape, arguments.micro, arguments.profile = cell.shape, cell.micro, cell.case
        case = Case.parse(cell.case)
        found = run_ranks(partial(run, case, arguments), arguments.ranks, timeout=arguments.timeout, gpus=arguments.gpus)
        fault = failure(found)
        row = {"case": cell.case, "ranks": arguments.ranks, "shape": cell.shape, "micro": cell.micro, "seq": arguments.seq}
        row |= {"fault": fault} if fault else summary(case, arguments, [one["value"] for one in found])
        checked = case.compiled and case.engine == "zeroplan"  # its first micro batch, which runs uncompiled
        row |= {
            "uncompiled_first": checked,
            "released_first": checked,
            "versions": versions(),
            "command": command("benchmarks.step.speed_table"),
        }
        with arguments.out.open("a") as out:
            out.write(json.dumps(row if fault else with_mfu(row)) + "\n")
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
