"""The head and the loss of BERT over labelled tokens alone, beside those over all tokens, on one device.

    python -m benchmarks.kernels.labelled_tokens [--model google-bert/bert-large-uncased] [--micro 32] [--share 0.15]

First the head alone, forward and backward, by transformers' own class on hidden states that are given: loss and gradients are
held against those over all tokens, then both are timed in turn. Then a few training steps of the whole model under the included
runtime, with the peak of allocated bytes beside the plan's. The goals: a fifth of the time, and the plan within 0.1 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeroplan
import zeroplan_runtime
from benchmarks.kernels.measure import machine, race, save
from zeroplan.core.losses import IGNORED_LABEL, labelled_tokens
from zeroplan.models.catalog import find
from zeroplan_runtime.techniques.labelled_tokens import attach_labelled_tokens

_STEPS = 4


class _Given(nn.Module):
    """Stands for the base model: it returns hidden states that it has."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the hidden states as the base model's output."""
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.hidden)


def main() -> None:
    """Checks and times the head, then measures the whole model's peak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="google-bert/bert-large-uncased")
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model's, of which no plan is")
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads = _heads(given, device)
    rows = {name: _trained(given, device, labelled=name == "labelled tokens") for name in heads}
    print(f"{'':16s} {'head, ms':>9s} {'peak':>11s} {'planned':>11s}")
    for name, row in rows.items():
        row |= heads[name]
        shown = [f"{row[key] / 2**30:7.3f} GiB" if row.get(key) else "" for key in ("peak_allocated", "planned_peak")]
        print(f"{name:16s} {row['ms']:9.3f} {shown[0]:>11s} {shown[1]:>11s}")
    ratio = heads["labelled tokens"]["ms"] / heads["all tokens"]["ms"]
    print(f"the head over labelled tokens takes {ratio:.3f} of the time")
    sizes = {name: getattr(given, name) for name in ("model", "micro", "seq", "share")}
    save("kernels_labelled_tokens", {"machine": machine(device), "sizes": sizes, "head_ratio": ratio, "rows": rows}, given.out)


def _model(given: argparse.Namespace, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForMaskedLM

    entry = find(given.model)
    if entry is None:
        raise SystemExit(f"{given.model} is not in the catalog: zeroplan models lists it")
    values = {name: value for name, value in entry.config.items() if name != "architectures"}
    if given.layers:
        values["num_hidden_layers"] = given.layers
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForMaskedLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()


def _batch(given: argparse.Namespace, device: torch.device, vocab: int, seed: int) -> dict[str, torch.Tensor]:
    """Return tokens, and labels of exactly the share of them that a plan counts."""
    generator = torch.Generator().manual_seed(seed)
    count = given.micro * given.seq
    tokens = torch.randint(0, vocab, (count,), generator=generator)
    labels = torch.full((count,), IGNORED_LABEL)
    labelled = torch.randperm(count, generator=generator)[: labelled_tokens(count, given.share)]
    labels[labelled] = tokens[labelled]
    shape = (given.micro, given.seq)
    return {"input_ids": tokens.view(shape).to(device), "labels": labels.view(shape).to(device)}


def _heads(given: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """Time the head's forward and backward over all tokens and over the labelled ones, after holding one against the other.

    Raises:
        SystemExit: when they differ.
    """
    model = _model(given, device)
    hidden = torch.randn(given.micro, given.seq, model.config.hidden_size, device=device, dtype=torch.bfloat16)
    base = model.base_model_prefix
    setattr(model, base, _Given(hidden.requires_grad_()))
    batch = _batch(given, device, model.config.vocab_size, seed=0)
    params = [param for name, param in model.named_parameters() if not name.startswith(f"{base}.")]

    def step() -> tuple[torch.Tensor, ...]:
        loss = model(**batch).loss
        return (loss.detach(), *torch.autograd.grad(loss, [hidden, *params], allow_unused=True))

    def picked() -> tuple[torch.Tensor, ...]:
        detach = attach_labelled_tokens(model)
        found = step()
        detach()
        return found

    whole, alone = step(), picked()
    errors = [
        float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(whole, alone, strict=True) if a is not None
    ]
    if max(errors) > 0.02:
        raise SystemExit(f"loss and gradients differ by {errors} of their norms")
    contenders: dict[str, tuple[Callable[[], object], float]] = {"all tokens": (step, 0.0), "labelled tokens": (picked, 0.0)}
    times = race(contenders, device)
    return {name: {"ms": row["ms"], "error": max(errors)} for name, row in times.items()}


def _trained(given: argparse.Namespace, device: torch.device, *, labelled: bool) -> dict[str, Any]:
    """Measure the peak of a few steps of the whole model, and plan it."""
    config = {
        "train_micro_batch_size_per_gpu": given.micro,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "zeroplan": {"labelled_tokens_only": labelled, "audit_steps": 0},
    }
    found: dict[str, Any] = {}
    if device.type == "cuda" and not given.layers:
        share = given.share if labelled else None
        name = torch.cuda.get_device_name()
        plans = zeroplan.estimate(
            given.model, ds_config=config, engine="zeroplan", seq_len=given.seq, gpu=name, labelled_share=share
        )
        found["planned_peak"] = plans[0].gpu.peak_allocated
    model = _model(given, device)
    vocab = model.config.vocab_size
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, device=device)
    for number in range(_STEPS):
        if device.type == "cuda" and number == 1:  # cuBLAS has its workspaces
            torch.cuda.reset_peak_memory_stats()
        engine.backward(engine(**_batch(given, device, vocab, seed=number)).loss)
        engine.step()
    if device.type == "cuda":
        found["peak_allocated"] = torch.cuda.max_memory_allocated()
    engine.destroy()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    main()
