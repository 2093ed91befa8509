"""What was asked for, in a few words: the model, the GPUs, the workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.units import format_count


def model_text(name: str, params: int, trainable: int) -> str:
    """A model by its name and size."""
    return f"{name}: {params:,} parameters" + (f" ({format_count(trainable)} trainable)" if trainable != params else "")


def gpus_text(nodes: int, gpus: int) -> str:
    """How many GPUs, by node where there are several."""
    if nodes > 1:
        return f"{nodes} × {gpus} GPUs"
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def work_text(work: Mapping[str, Any]) -> str:
    """A workload, as the JSON has it, in a few words."""
    batch = f"batch {work['micro_batch']} × {work['seq_len']}"
    if work["grad_accum"] > 1:
        batch += f" × {work['grad_accum']} accumulated"
    return f"{work['dtype']} {work['optimizer']} · {batch}"
