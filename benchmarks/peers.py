"""Other estimators on the measured runs, beside ours: error against the memory that NVML showed.

``python -m benchmarks.peers [--json FILE] [--no-mem-tracker]``. Each peer is the installed package, called as its users
call it; a row that it has no figure for is left out of its column. accelerate and llm-analysis count no sharding by
DeepSpeed's offloads, so offloading rows are left out of theirs. MemTracker runs one rank of plain torch on fake tensors, so
it applies to unsharded rows on one GPU. Needs the packages named in `PEERS`; one that is missing is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rows import MEASURED, load_rows, request_of
from zeroplan.models.facts import spec_facts
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report

RESULT = Path(__file__).resolve().parent / "results" / "peers.json"
Row = dict[str, Any]


def ours(row: Row) -> int | None:
    """Return zeroplan's total of a row."""
    (plan,) = estimate_report(request_of(row)).plans
    return plan.gpu.total


def deepspeed_estimator(row: Row) -> int | None:
    """Return the figure of DeepSpeed's own estimator: stages 2 and 3."""
    if row["engine"] != "deepspeed":
        return None
    (plan,) = estimate_report(request_of(row, depth="formula")).plans
    return plan.deepspeed_estimator.gpu if plan.deepspeed_estimator else None


def accelerate_estimate(row: Row) -> int | None:
    """Return the figure of ``accelerate estimate-memory``: training with Adam, whatever the sharding, at batch 1."""
    from accelerate.commands.estimate import estimate_training_usage

    if (row["zero_overrides"] or {}).get("offload_optimizer") or row["lora_rank"]:
        return None
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[row["dtype"]]
    return int(max(estimate_training_usage(4 * row["n_params"], name).values()))


def llm_analysis(row: Row) -> int | None:
    """Return the figure of llm-analysis: states over DeepSpeed's stages, activations and gathers by its formulas."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig

    if (row["zero_overrides"] or {}).get("offload_optimizer") or row["lora_rank"] or row["dtype"] == "fp32":
        return None  # it asserts 4, 8 or 16 bits
    spec = load_model(row["model"])
    facts = spec_facts(spec)
    assert facts.hidden_size, row["model"]
    config = spec.config
    inner = config.get("intermediate_size") or config.get("ffn_dim") or config.get("n_inner") or 4 * facts.hidden_size
    model = ModelConfig(
        name=row["model"],
        num_layers=facts.layers,
        n_head=facts.heads,
        hidden_dim=facts.hidden_size,
        vocab_size=facts.vocab_size,
        num_key_value_heads=facts.kv_heads,
        ffn_embed_dim=inner,
        expansion_ratio=inner / facts.hidden_size,
        max_seq_len=row["seq_len"],
    )
    analysis = LLMAnalysis(
        model,
        GPUConfig("gpu", 141, 4800, 450, 8e-6, 989),
        DtypeConfig("w16a16e16", 16, 16, 16),
        ParallelismConfig(dp_size=row["world"]),
        flops_efficiency=0.5,
        hbm_memory_efficiency=0.8,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        summary = analysis.training(
            batch_size_per_gpu=row["micro_batch"],
            gradient_accumulation_steps=row["gradient_accumulation_steps"],
            seq_len=row["seq_len"],
            activation_recomputation=ActivationRecomputation.FULL
            if row["gradient_checkpointing"]
            else ActivationRecomputation.NONE,
            ds_zero=DSZeRO(row["stage"]),
            flash_attn=row["attn"] != "eager",
            mlp_gated_linear_units=config.get("hidden_act") == "silu",
        )
    parts = ("weight_memory_per_gpu", "gradient_memory_per_gpu", "optimizer_state_memory_per_gpu", "activation_memory_per_gpu")
    total: float = sum(summary[name] for name in parts)
    return round(total)


def mem_tracker(row: Row) -> int | None:
    """Return the figure of torch's MemTracker over two steps of plain training on fake tensors."""
    if row["world"] > 1 or row["stage"] or row["engine"] == "fsdp2":
        return None
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(load_model(row["model"]).config)
    dtype = torch.float32 if row["engine"] == "ddp" or row["dtype"] == "fp32" else torch.bfloat16
    with FakeTensorMode():
        made = AutoConfig.for_model(config.pop("model_type"), **config)
        model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=row["attn"]).train()
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        tokens = torch.randint(0, 1000, (row["micro_batch"], row["seq_len"]))
        with tracker:
            for step in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=row["engine"] == "ddp"):
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if not step:
                    tracker.reset_mod_stats()
        return sum(parts["Total"] for parts in tracker.get_tracker_snapshot("peak").values())


PEERS: dict[str, Callable[[Row], int | None]] = {
    "zeroplan": ours,
    "DeepSpeed's estimator": deepspeed_estimator,
    "accelerate": accelerate_estimate,
    "llm-analysis": llm_analysis,
    "MemTracker": mem_tracker,
}


def main() -> None:
    """Print every row and the summary, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--no-mem-tracker", action="store_true", help="leave out the slow one")
    args = parser.parse_args()
    names = [name for name in PEERS if not (args.no_mem_tracker and name == "MemTracker")]
    missing: set[str] = set()
    rows: list[dict[str, Any]] = []
    print(f"{'row':5}" + "".join(f"{name:>24}" for name in names))
    for row in load_rows(MEASURED):
        errors: dict[str, float | None] = {}
        for name in names:
            figure = None
            if name not in missing:
                try:
                    figure = PEERS[name](row)
                except ImportError:
                    missing.add(name)
            errors[name] = None if figure is None else figure / row["nvml_used"] - 1
        rows.append({"id": row["id"], **errors})
        print(f"{row['id']:5}" + "".join(f"{'-' if e is None else f'{e:+.1%}':>24}" for e in errors.values()), flush=True)
    summary = {}
    for name in names:
        errors_of = [row[name] for row in rows if row[name] is not None]
        if errors_of:
            summary[name] = {
                "rows": len(errors_of),
                "mean_absolute": statistics.fmean(abs(e) for e in errors_of),
                "worst": max(errors_of, key=abs),
                "below": sum(e < 0 for e in errors_of),
            }
            s = summary[name]
            average, worst = f"off by {s['mean_absolute']:.1%} on average", f"worst {s['worst']:+.1%}"
            print(f"{name:24} {s['rows']:3} rows, {average}, {worst}, {s['below']} below")
    from zeroplan.core.plumbing.files import write_atomic

    write_atomic(args.json, json.dumps({"summary": summary, "missing": sorted(missing), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
