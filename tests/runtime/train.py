"""Training the small models under the runtime, as one call that a pool of ranks runs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import models

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def ds_config(stage: int, dtype: str = "fp32", **changes: Any) -> dict[str, Any]:
    """A ds_config without clipping whose units are all small enough to be units of their own."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": models.BATCH,
        "gradient_clipping": 0.0,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage},
        "zeroplan": {"wide_numel": 500},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"loss_scale": 1024} if dtype == "fp16" else {})}
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(config.get(key), dict) and isinstance(value, dict) else value
    return config


def train(
    group: dist.ProcessGroup, config: dict[str, Any], model: dict[str, Any] | None = None, steps: int = 20
) -> dict[str, Any]:
    """Losses by step, the final parameters (first rank), the last norm and the Arena's rows."""
    rank = dist.get_rank(group)
    engine, *_ = zeroplan_runtime.initialize(model=models.make(**(model or {})), config=config, group=group, device="cpu")
    losses = []
    for number in range(steps):
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(models.batch(number, micro, rank))
            total += engine.backward(loss).item()
            engine.step()
        losses.append(total)
    return {
        "losses": losses,
        "params": engine.module_state_dict(),
        "norm": engine.get_global_grad_norm(),
        "rows": engine.arena.measurement(),
        "layout": engine.model_states.layout,
        "skipped": engine.skipped_steps,
        "scale": engine.loss_scale,
    }


def train_all(
    group: dist.ProcessGroup, cases: list[tuple[dict[str, Any], dict[str, Any]]], steps: int = 20
) -> list[dict[str, Any]]:
    """:func:`train` for each (config, model) in turn."""
    return [train(group, config, model, steps) for config, model in cases]


def distance(result: dict[str, Any], plain: models.Plain) -> float:
    """The largest difference of any parameter."""
    found = result["params"]
    return max((found[n].float() - p.detach().float()).abs().max().item() for n, p in plain.model.state_dict().items())


def loss_distance(results: list[dict[str, Any]], expected: list[list[float]]) -> float:
    """The largest difference of any rank's loss at any step."""
    pairs = ((results[r]["losses"][s], e) for s, row in enumerate(expected) for r, e in enumerate(row))
    return max(itertools.starmap(lambda a, b: abs(a - b), pairs))


def dtype_of(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
