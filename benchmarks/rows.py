"""Measured rows as requests: what a user would have asked to predict that run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure.models import CLASS, FURTHER, VISION
from benchmarks.measure.spec import FUSED, WITHOUT_BETAS
from zeroplan.core.workload import OptimizerKind, Precision
from zeroplan.models.catalog import find
from zeroplan.run.ask import Ask
from zeroplan.techniques.freeze import FreezeRule
from zeroplan.techniques.fused_adapters import PARTS

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "ground_truth" / "measured.jsonl"
EXTRA = HERE / "ground_truth" / "extra.jsonl"
#: Heads, quantised bases, FSDP 1, T5, fp16 autocast, steps that are not fused, kept gradients; predicted before they ran.
TASKS = HERE / "ground_truth" / "tasks.jsonl"
#: Configurations drawn at random (measure/draw.py), predicted before they ran.
DRAWN = HERE / "ground_truth" / "drawn.jsonl"
#: Classes of transformers drawn at random (measure/classes.py), predicted before they ran.
CLASSES = HERE / "ground_truth" / "classes.jsonl"
#: Liger, cut cross-entropy, and parameters without gradient, predicted before they ran.
KERNELS = HERE / "ground_truth" / "kernels.jsonl"
#: FSDP 1 with offload, averages of weights, modules trained beside adapters, predicted before they ran.
BESIDE_ADAPTERS = HERE / "ground_truth" / "beside_adapters.jsonl"
#: Videos, sound, frozen parts, predicted before they ran.
MEDIA = HERE / "ground_truth" / "media.jsonl"
#: What an earlier version of this tool missed, without marks.
MISSES = HERE / "ground_truth" / "misses.jsonl"
#: The files of rows whose memory is held against the plan of today.
PLANNED = (MEASURED, EXTRA, TASKS, DRAWN, CLASSES, KERNELS, BESIDE_ADAPTERS, MEDIA, MISSES)
#: The recommendation's grids: each candidate alone on its host, timed without marks. Failures are rows, too.
GRID = HERE / "ground_truth" / "grid.jsonl"
#: The linear layers that the measured LoRA runs adapt.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Drivers' names of GPUs, and their presets'.
GPUS = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}


def load_rows(*paths: Path) -> list[dict[str, Any]]:
    """Load all rows of these files that ran."""
    rows = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines() if line.strip()]
    return [row for row in rows if row.get("ok", True)]


def ds_config_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the ds_config that a DeepSpeed row ran with (README of the rows)."""
    type_ = row.get("optimizer_type", "AdamW")
    betas = {} if type_ in WITHOUT_BETAS else {"betas": [0.9, 0.95]}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": row["micro_batch"],
        "gradient_accumulation_steps": row["gradient_accumulation_steps"],
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": type_,
            "params": {"lr": 1e-5, **betas, "weight_decay": 0.1, **(row.get("opt_params") or {})},
        },
        "zero_optimization": {"stage": row["stage"], **(row.get("zero_overrides") or {})},
        **(row.get("ds_overrides") or {}),
    }
    if row["dtype"] != "fp32":
        config.setdefault(row["dtype"], {"enabled": True})
    return config


def request_of(row: dict[str, Any], *, depth: str | None = None) -> Ask:
    """Return the request whose one plan predicts this row."""
    common: dict[str, Any] = {
        "model": model_of(row),
        "micro_batch": row["micro_batch"],
        "seq_len": row["seq_len"],
        "grad_accum": row["gradient_accumulation_steps"],
        "dtype": None if "torch_autocast" in (row.get("ds_overrides") or {}) else row["dtype"],  # which says the products'
        "gradient_checkpointing": row["gradient_checkpointing"],
        "attn": row["attn"] or "sdpa",
        "lora_rank": row["lora_rank"],
        "lora_targets": _targets(row) if row["lora_rank"] else (),
        "base_dtype": _base(row),
        "reentrant": row.get("reentrant"),
        "offload_checkpoints": row.get("offload_checkpoints", False),
        "precision": None if row.get("precision") is None else Precision(row["precision"]),
        "reduce_dtype": row.get("reduce_dtype"),
        "compile": row.get("compile"),
        "gpus": row["world"],
        "gpu": GPUS[row["gpu"]],
        "engine": row["engine"],
        "depth": depth,
        "alloc_conf": row.get("alloc_conf") or "",
        "from_scratch": True,  # the runs built their models with random weights
        "task": None if row.get("images") or row.get("audio_seconds") else row.get("task"),  # its class is what its config says
        "quantize": row.get("quantize"),
        "adapter_dtype": row.get("adapter_dtype"),
        "fp8": row.get("fp8"),
        "images": row.get("images", 0),
        "image_size": row.get("image_size"),
        "video_frames": row.get("video_frames", 0),
        "audio_seconds": row.get("audio_seconds", 0),
        "freeze": tuple(row.get("freeze", ())),
        "freeze_rule": FreezeRule("freeze", half=row.get("precision") == "half-autocast") if row.get("freeze") else None,
        "set_to_none": row.get("set_to_none", True),
        "target_len": row.get("target_len"),
        "save": row.get("save"),
        "one_unit": row.get("one_unit", False),
        "modules_to_save": tuple(row.get("modules_to_save") or ()),
        "label_smoothing": row.get("label_smoothing"),
        "ema": row.get("ema"),
        **(
            {}
            if row.get("kernels") is None
            else {row["kernels"]: ",".join(PARTS) if row["kernels"] == "fused_adapters" else True}
        ),
    }
    offload = "cpu" if row.get("offload") else None
    if row["engine"] != "deepspeed":
        common |= _stepped_by(row.get("optimizer_type", "AdamW"), row.get("opt_params") or {})
    if row["engine"] == "deepspeed":
        return Ask(**common, ds_config=ds_config_of(row))
    if row["engine"] == "fsdp":
        stage = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}[row.get("strategy", "FULL_SHARD")]
        return Ask(**common, stage=stage, offload_optimizer=offload, offload_param=offload)
    return Ask(**common, stage=row["stage"], offload_optimizer=offload, offload_param=offload)


#: The classes that torch's engines stepped with, by the names of ``--optimizer``.
_OPTIMIZERS = {
    "AdamW": "adamw",
    "Adam": "adam",
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "Adafactor": "adafactor",
    "RMSprop": "rmsprop",
    "NAdam": "nadam",
    "bitsandbytes.optim.AdamW8bit": "adamw8bit",
    "transformers.Adafactor": "adafactor_transformers",
}


def _base(row: dict[str, Any]) -> str | None:
    """Return how frozen weights of a row of torch's engines were kept: adapters had the model's dtype, which was fp32."""
    whole = row["lora_rank"] and row["engine"] != "deepspeed" and not row.get("quantize") and not row.get("precision")
    return "fp32" if whole else None


def _targets(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the adapted layers; none named are all linear ones."""
    named = tuple(row.get("lora_targets") or LORA_TARGETS)
    return () if named == ("all-linear",) else named


def _stepped_by(type_: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return a row's optimizer as fields of a request; the runs ask for the fused step unless a row says otherwise."""
    name = _OPTIMIZERS[type_]
    if name == "sgd" and params.get("momentum"):
        name = "sgd_momentum"
    if "." in type_:
        return {"optimizer": name}
    fused = type_ in FUSED
    return {"optimizer": name, "optimizer_kind": _kind({"fused": fused, **params})}


def _kind(params: dict[str, Any]) -> OptimizerKind:
    """Return how torch's optimizer walked its tensors."""
    if params.get("fused", True):
        return OptimizerKind.FUSED
    return OptimizerKind.FOREACH if params.get("foreach", True) else OptimizerKind.LOOP


def model_of(row: dict[str, Any]) -> str | dict[str, Any]:
    """The model's name, or the config of one that has single values changed."""
    changes = row.get("model_overrides")
    if row["model"].startswith(CLASS):
        return dict(changes or {})
    own = FURTHER.get(row["model"]) or VISION.get(row["model"])
    if own is not None:
        return {**own, **(changes or {})}
    if not changes:
        return str(row["model"])
    entry = find(row["model"])
    assert entry is not None, row["model"]
    return {**entry.config, **changes}
