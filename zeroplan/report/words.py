"""Short descriptions of what was asked for: the model, the GPUs, the workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.units import format_count


def model_text(name: str, params: int, trainable: int) -> str:
    """Return ``"openai-community/gpt2: 124,439,808 parameters (1.2 M trainable)"``."""
    return f"{name}: {params:,} parameters" + (f" ({format_count(trainable)} trainable)" if trainable != params else "")


def gpus_text(nodes: int, gpus: int) -> str:
    """Return ``"8 GPUs"``, or ``"2 × 8 GPUs"`` for two nodes of eight."""
    if nodes > 1:
        return f"{nodes} × {gpus} GPUs"
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def work_text(work: Mapping[str, Any]) -> str:
    """Return ``"bf16 adamw · batch 1 × 2048 × 4 accumulated"`` for a workload as the report's JSON holds it."""
    batch = f"batch {work['micro_batch']} × {work['seq_len']}"
    if work["grad_accum"] > 1:
        batch += f" × {work['grad_accum']} accumulated"
    return f"{work['dtype']} {work['optimizer']} · {batch}"
