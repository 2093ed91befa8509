"""Whole trainings with a technique, by ``verify``: the plan beside what a GPU allocated, reserved and took altogether.

    python -m benchmarks.techniques.trainings [--rows sparse,fused] [--predict] [--small] [--out FOLDER]

Each technique's training runs beside the same model's without it, three steps on one rank. `--predict` writes the plans for an
H200 alone, anywhere; `--small` takes models of a few layers, for a try on a CPU, where tensors are counted instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import zeroplan
from benchmarks.kernels.measure import machine, save
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.quantize_training import QUANTIZE_TRAINING, QuantizeTraining

_FLAGS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")
_FIXED: dict[str, Any] = {"mode": "fixed"}
_BIGBIRD: dict[str, Any] = {"mode": "bigbird", "num_random_blocks": 1}
_ROUNDED = QuantizeTraining(8, 8, 1, 0, 8)


@dataclass(frozen=True)
class Training:
    """One training: `model` is a config, or makes a module where there are `inputs`."""

    name: str
    model: dict[str, Any] | Callable[[], torch.nn.Module]
    micro: int
    seq: int
    section: dict[str, Any] = field(default_factory=dict)
    stage: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def ds_config(self) -> dict[str, Any]:
        """Return its ds_config."""
        return {
            "train_micro_batch_size_per_gpu": self.micro,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": self.stage},
            **self.section,
        }

    def arguments(self) -> dict[str, Any]:
        """Return what ``estimate`` and ``verify`` are asked."""
        found: dict[str, Any] = {"ds_config": self.ds_config(), "engine": "zeroplan", "gpus": 1, **self.options}
        if callable(self.model):
            ids = torch.arange(self.micro * self.seq).view(self.micro, self.seq) % 1000
            return {"model": self.model(), "inputs": {"input_ids": ids, "labels": ids}, **found}
        return {"model": self.model, "seq_len": self.seq, **found}


def trainings(*, small: bool) -> list[Training]:
    """Return the trainings; a technique's name is the part before a colon."""
    layers, width, heads = (2, 128, 2) if small else (24, 1024, 16)
    long, many = (512, 2) if small else (8192, 16)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": heads}
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **sizes, "max_position_embeddings": long}
    undropped = {**bert, "attention_probs_dropout_prob": 0.0}
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, "num_key_value_heads": heads // 2}
    llama |= {"vocab_size": 32000, "max_position_embeddings": long, "tie_word_embeddings": False}
    seq = 128 if small else 512

    def fused(**flags: bool) -> Callable[[], torch.nn.Module]:
        return lambda: fused_bert(sizes, seq, **flags)

    return [
        Training("sparse: bert, dense", undropped, 1, long),
        Training("sparse: bert, fixed", undropped, 1, long, {"sparse_attention": _FIXED}),
        Training("sparse: bert, bigbird", undropped, 1, long, {"sparse_attention": _BIGBIRD}),
        Training("sparse: llama, fixed", llama, 1, long, {"sparse_attention": _FIXED}, stage=2),
        Training("labelled: bert, all", bert, many, seq),
        Training("labelled: bert, 15 %", bert, many, seq, options={"labelled_share": 0.15}),
        Training("rounded: llama, none", llama, 1, seq * 4),
        Training("rounded: llama, 8 bits", llama, 1, seq * 4, {QUANTIZE_TRAINING: _ROUNDED.as_section()}),
        Training("fused: bert, transformers' layers", lambda: plain_bert(sizes, seq), many, seq),
        Training("fused: bert, no flag", fused(), many, seq),
        Training("fused: bert, all flags", fused(**dict.fromkeys(_FLAGS, True)), many, seq),
    ]


def plain_bert(sizes: dict[str, Any], seq: int) -> torch.nn.Module:
    """Return a BERT of transformers with random weights."""
    import transformers

    torch.manual_seed(0)
    model: torch.nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, max_position_embeddings=seq))
    return model


def fused_bert(sizes: dict[str, Any], seq: int, **flags: bool) -> torch.nn.Module:
    """Return the same BERT with fused layers."""
    from zeroplan_runtime.transformer import use_transformer_layer

    model = plain_bert(sizes, seq)
    use_transformer_layer(model, **flags)
    return model


def main() -> None:
    """Plans or verifies the trainings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="", help="techniques, with commas between; all by default")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    chosen = given.rows.split(",") if given.rows else []
    rows = [each for each in trainings(small=given.small) if not chosen or each.name.partition(":")[0] in chosen]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {}
    name = "techniques_trainings_predicted" if given.predict else "techniques_trainings"
    for each in rows:
        found[each.name] = predicted(each) if given.predict else measured(each)
        print(f"{each.name:34s} " + "  ".join(f"{key} {_shown(value)}" for key, value in found[each.name].items()), flush=True)
        save(name, {"machine": machine(device), "small": given.small, "rows": found}, given.out)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:+.3%}" if abs(value) < 1 else f"{value:.3f}"
    return f"{value / 2**20:,.2f} MiB" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def predicted(training: Training) -> dict[str, Any]:
    """Return a training's plan on an H200."""
    return _figures(zeroplan.estimate(gpu="H200", from_scratch=True, **training.arguments())[0])


def _figures(plan: MemoryPlan) -> dict[str, Any]:
    gpu = plan.gpu
    return {"planned_allocated": gpu.peak_allocated, "planned_reserved": gpu.peak_reserved, "planned_total": gpu.total}


def measured(training: Training) -> dict[str, Any]:
    """Return a training's plan and measurement, and by how much of the measured one the plan is off; or what ended it."""
    asked = training.arguments()
    try:
        drift = zeroplan.verify(asked.pop("model"), progress=lambda _: None, **asked)
    except BadInput as fault:
        return {"fault": str(fault)}
    one = drift.comparisons[0]
    run = one.measurement
    found = {**_figures(one.plan), "allocated": run.peak_allocated, "reserved": run.peak_reserved, "total": run.total}
    for name in ("allocated", "reserved", "total"):
        plan, got = found[f"planned_{name}"], found[name]
        found[f"{name}_error"] = plan / got - 1 if plan and got else None
    found |= {"owned_exact": not one.mismatches, "step_seconds": run.step_seconds, "host": run.host}
    if run.failure or run.out_of_memory:
        found["fault"] = run.failure or (run.out_of_memory.message if run.out_of_memory else "")
    return found


if __name__ == "__main__":
    main()
