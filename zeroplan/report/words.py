"""Short descriptions of what was asked for, and of a plan: the model, the GPUs, the workload, the sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.sizes import TIB, format_bytes, format_count


def model_text(name: str, params: int, trainable: int) -> str:
    """Return ``"openai-community/gpt2: 124,439,808 parameters (1.2 M trainable)"``."""
    text = name if name.endswith(" parameters") else f"{name}: {params:,} parameters"
    return text + (f" ({format_count(trainable)} trainable)" if trainable != params else "")


def gpus_text(nodes: int, gpus: int) -> str:
    """Return ``"8 GPUs"``, or ``"2 × 8 GPUs"`` for two nodes of eight."""
    if nodes > 1:
        return f"{nodes} × {gpus} GPUs"
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def host_text(memory: int, usable: int, assumed: bool) -> str:
    """Return ``"512 GiB host (502.0 GiB usable)"``, with ``assumed`` where no flag gave it; sizes are bytes."""
    how = ", assumed: --cpu-ram" if assumed else ""
    digits = 1 if memory > TIB and memory % TIB else 0
    return f"{format_bytes(memory, digits=digits)} host ({format_bytes(usable, digits=1)} usable{how})"


def degrees_text(layout: Mapping[str, Any]) -> str:
    """Return ``"dp 2 × tp 4 with split tokens"`` for a layout as the report's JSON holds it."""
    degrees = [f"{name} {layout[name]}" for name in ("dp", "tp", "cp", "ulysses", "pp", "vpp", "ep") if layout.get(name, 1) > 1]
    text = (" × ".join(degrees) or "one rank") + (" with split tokens" if layout["sp"] else "")
    return text + (f" in {replicas} replicas" if (replicas := layout.get("dp_replicate", 1)) > 1 else "")


def machine_text(cluster: Mapping[str, Any]) -> str:
    """Return ``"8 GPUs of 80 GiB (79.4 GiB usable), 512 GiB host (…)"`` for a cluster as the report's JSON holds it."""
    text = gpus_text(cluster["nodes"], cluster["gpus"])
    if layout := cluster.get("layout"):
        text += f" as {degrees_text(layout)}"
    if cluster["vram"]:
        left = "usable" if cluster.get("held") is None else f"free: {held} held" if (held := cluster["held"]) else "free"
        text += f" of {format_bytes(cluster['vram'], digits=0)} ({format_bytes(cluster['usable_vram'], digits=1)} {left})"
    if cluster["cpu_ram"]:
        text += f", {host_text(cluster['cpu_ram'], cluster['usable_cpu_ram'], cluster['cpu_ram_assumed'])}"
    if cluster["nvme"]:
        text += f", {format_bytes(cluster['nvme'], digits=0)} disk"
    return text


def work_text(work: Mapping[str, Any]) -> str:
    """Return ``"bf16 adamw · batch 1 × 2048 × 4 accumulated"`` for a workload as the report's JSON holds it."""
    batch = f"batch {work['micro_batch']} × {work['seq_len']}" + (f" → {work['target_len']}" if work.get("target_len") else "")
    if work["grad_accum"] > 1:
        batch += f" × {work['grad_accum']} accumulated"
    text = f"{work['dtype']} {work['optimizer']} · {batch}"
    if work.get("lora_rank"):
        text += f" · LoRA rank {work['lora_rank']}"
        base = {"half-autocast": work["dtype"], "autocast": "fp32"}.get(work.get("precision", ""))
        text += f" over {base} weights (--base-dtype)" if base and not work.get("quantize") else ""
    if work.get("quantize"):
        text += f" · {work['quantize']} base"
    if work.get("compile"):
        text += f" · {work['compile']} compiled"
    return text + (" · checkpointing" if work.get("gradient_checkpointing") else "")
