"""The trainings that the benchmarks of techniques compare: a Llama by sizes, under the included runtime on one device."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import zeroplan
import zeroplan_runtime

#: Untimed steps of each training.
WARM_STEPS = 3


def arguments(doc: str, **defaults: int) -> argparse.Namespace:
    """Parse the sizes that every benchmark has; `defaults` replaces theirs and adds others."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    sizes = {"layers": 24, "width": 1536, "vocab": 32000, "micro": 8, "seq": 2048, "steps": 40, **defaults}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def shape(given: argparse.Namespace) -> dict[str, Any]:
    """Return the config of a Llama, whose blocks add to what they are given, of these sizes."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": given.width,
        "intermediate_size": 4 * given.width,
        "num_hidden_layers": given.layers,
        "num_attention_heads": max(given.width // 128, 1),
        "num_key_value_heads": max(given.width // 128, 1),
        "vocab_size": given.vocab,
        "max_position_embeddings": given.seq,
        "tie_word_embeddings": False,
    }


def ds_config(given: argparse.Namespace, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ds_config with the technique's section."""
    return {
        "train_micro_batch_size_per_gpu": given.micro,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "zeroplan": {"audit_steps": 0},
        **section,
    }


def planned(given: argparse.Namespace, section: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the planned peaks of allocated and reserved bytes on this machine's GPU; None on a CPU, of which no plan is."""
    if not torch.cuda.is_available():
        return {"planned_peak": None, "planned_reserved": None}
    plans = zeroplan.estimate(
        shape(given),
        ds_config=ds_config(given, section),
        engine="zeroplan",
        seq_len=given.seq,
        gpu=torch.cuda.get_device_name(),
    )
    return {"planned_peak": plans[0].gpu.peak_allocated, "planned_reserved": plans[0].gpu.peak_reserved}


def engine_of(given: argparse.Namespace, section: Mapping[str, Any]) -> zeroplan_runtime.Engine:
    """Return the engine that trains the model with the technique's section."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in shape(given).items() if name != "architectures"}
    config = AutoConfig.for_model(values.pop("model_type"), **values, use_cache=False)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    return zeroplan_runtime.initialize(model=model, config=ds_config(given, section))[0]


def timed(
    engine: zeroplan_runtime.Engine,
    given: argparse.Namespace,
    *,
    steps: int,
    warm: int = WARM_STEPS,
    after: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Time steps on random tokens; `after` is called after each.

    Returns:
        Milliseconds of each timed step, the losses of the first and the last, and the greatest allocated and reserved bytes
        of all steps where there is a GPU.
    """
    device = engine.device
    generator = torch.Generator(device).manual_seed(0)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    marks, losses = [], []
    for number in range(warm + steps):
        if number == warm:
            marks = [_mark(cuda)]
        tokens = torch.randint(0, given.vocab, (given.micro, given.seq), generator=generator, device=device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        marks.append(_mark(cuda))
        after()
    if cuda:
        torch.cuda.synchronize()
    marks = marks[-steps - 1 :]
    found: dict[str, Any] = {
        "ms": [a.elapsed_time(b) if cuda else (b - a) * 1e3 for a, b in pairwise(marks)],
        "losses": [float(losses[0]), float(losses[-1])],
    }
    if cuda:
        found |= {"peak_allocated": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved()}
    return found


def release(engine: zeroplan_runtime.Engine) -> None:
    """Frees the engine's memory, so that the next training's peak is its own."""
    engine.destroy()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
