"""Holds the modelled time of layouts against published runs: ``python -m benchmarks.layouts.published``.

A published figure is tokens a second and GPU. Where a paper gives operations a second, they are divided by the operations a
token that it counts. Models without a described config of their own are Llamas of the same hidden size, depth and parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from zeroplan.core.rates import rates_of
from zeroplan.ledger.work import count_tape, guess_counts, matrices
from zeroplan.planner.request import Request
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import expand_for
from zeroplan.search.layout_time import LayoutCost, LayoutTime
from zeroplan.tapes import find_tape

_LLAMA = "meta-llama/Llama-3.1-{}"
#: GB/s a GPU between nodes, four fifths of the line rate as within nodes: 400 Gb/s on H100s, 200 Gb/s on A100s.
_H100, _A100 = 40.0, 20.0


@dataclass(frozen=True, slots=True)
class Published:
    """One run: what it was, tokens a second and GPU, and the same as a request."""

    name: str
    source: str
    tokens: float
    request: Request
    node_gbs: float = _H100


def _titan(name: str, table: str, tokens: float, model: str, nodes: int, **layout: Any) -> Published:
    asked = {"stage": 3, "micro_batch": 1} | layout
    request = Request(model=_LLAMA.format(model), gpus=8, gpu="H100", nodes=nodes, seq_len=8192, engine="fsdp2", **asked)
    return Published(name, f"torchtitan, benchmarks/{table}", tokens, request)


def _megatron(billions: int, width: int, depth: int, heads: int, nodes: int, pp: int, batch: int, tflops: float) -> Published:
    """Table 1 counts 96 B s l h² (1 + s / 6h + V / 16 l h) operations a step, recomputation included."""
    seq, vocabulary = 2048, 51200
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 8 * width // 3 // 64 * 64,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    operations = 96 * depth * width**2 * (1 + seq / (6 * width) + vocabulary / (16 * depth * width))
    dp = nodes * 8 // (8 * pp)
    layout: dict[str, Any] = {"tp": 8, "pp": pp, "stage": 2, "grad_accum": batch // dp, "gradient_checkpointing": True}
    request = Request(model=config, gpus=8, gpu="A100-80G", nodes=nodes, seq_len=seq, engine="fsdp2", **layout)
    name = f"GPT {billions}B, tp 8 × pp {pp}, {nodes * 8:,} A100"
    return Published(name, "Narayanan et al. 2021, table 1", tflops * 1e12 / operations, request, _A100)


def runs() -> Iterator[Published]:
    """Yield the published runs."""
    first, second = "llama3_h100_202412_torchtitan.md", "asyncTP_llama3_h100_2025-06_torchtitan.md"
    selective = {"gradient_checkpointing": True, "checkpoint_policy": "selective"}
    full = {"gradient_checkpointing": True}
    yield _titan("Llama 3.1 8B, FSDP 8", first, 5762, "8B", 1, micro_batch=2, **selective)
    yield _titan("Llama 3.1 8B, FSDP 128", first, 5605, "8B", 16, micro_batch=2, **selective)
    yield _titan("Llama 3.1 8B, FSDP 8 × tp 8", second, 4378, "8B", 8, micro_batch=12, tp=8, sp=True)
    yield _titan("Llama 3.1 70B, FSDP 32 × tp 8", second, 597.3, "70B", 32, micro_batch=16, tp=8, sp=True, **full)
    staged: dict[str, Any] = {"tp": 8, "pp": 8, "stage": 2, "grad_accum": 32, **full}
    yield _titan("Llama 3.1 405B, FSDP 8 × tp 8 × pp 8, Float8", first, 100, "405B", 64, **staged)
    yield _titan("the same, interleaved", first, 128, "405B", 64, vpp=2, **staged)
    operations = 6 * 405.9e9 + 6 * 126 * 16384 * 8192
    for nodes, batches, tflops in ((1024, 32, 430), (2048, 16, 400)):
        layout: dict[str, Any] = {"tp": 8, "pp": 16, "vpp": 4, "stage": 2, "grad_accum": batches}
        request = Request(model=_LLAMA.format("405B"), gpus=8, gpu="H100", nodes=nodes, seq_len=8192, engine="fsdp2", **layout)
        name = f"Llama 3 405B, tp 8 × pp 16, {nodes * 8:,} H100"
        yield Published(name, "Llama 3 (arXiv 2407.21783), table 4", tflops * 1e12 / operations, request)
    yield _megatron(145, 12288, 80, 96, 192, 8, 2304, 148)
    yield _megatron(310, 16384, 96, 128, 240, 16, 2160, 155)
    yield _megatron(1008, 25600, 128, 160, 384, 64, 3072, 163)
    mixture: dict[str, Any] = {"pp": 16, "ep": 64, "stage": 2, "grad_accum": 120, "gradient_checkpointing": True}
    request = Request(model="deepseek-ai/DeepSeek-V3", gpus=8, gpu="H100", nodes=256, seq_len=4096, engine="fsdp2", **mixture)
    yield Published(
        "DeepSeek-V3, pp 16 × ep 64, 2,048 H800, FP8", "arXiv 2412.19437, table 1", 14.8e12 / (2.664e6 * 3600), request
    )


def model(run: Published) -> LayoutTime:
    """Return the modelled time of a run."""
    case = resolve(run.request).cases[0]
    tape = find_tape(case.spec, case.workload, layout=case.parallel)
    tokens = case.workload.rows * (case.workload.seq_len or 0) // (case.layout.cp * case.layout.tp)
    counts = guess_counts(matrices(case.spec), case.workload, tokens) if tape is None else count_tape(expand_for(tape, case))
    return LayoutCost(case, counts, replace(rates_of(case.cluster.gpu), node_gbs=run.node_gbs)).time()


def main() -> None:
    """Print a table in Markdown."""
    print("| run | published, tokens/s a GPU | modelled | ratio | what it is modelled to be spent on |")
    print("|---|---:|---:|---:|---|")
    for run in runs():
        found = model(run)
        each = found.tokens_per_second / (run.request.gpus * run.request.nodes)
        parts = sorted(((seconds / found.total, name) for name, seconds in found.parts.items()), reverse=True)
        spent = ", ".join(f"{name} {100 * share:.0f} %" for share, name in parts if share >= 0.02)
        print(f"| {run.name} | {run.tokens:,.0f} | {each:,.0f} | {each / run.tokens:.2f} | {spent} |")


if __name__ == "__main__":
    main()
