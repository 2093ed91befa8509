"""What a DeepSpeed engine keeps between two steps: rows of parameters, masters and optimizer states."""

from __future__ import annotations

from typing import Any

import torch

from zeroplan.core.buffers import Buffer
from zeroplan.engines.torch_trainer import state_rows, tensors_row
from zeroplan.engines.verification import Row, TrainingRun


def rows_of(run: TrainingRun, engine: Any, optimizer: Any) -> list[Row]:
    """Return the rows of parameters, masters and states that an engine keeps."""
    inner = getattr(optimizer, "optimizer", optimizer)
    params = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    found = [tensors_row(Buffer.PARAM_SHARD if run.stage == 3 else Buffer.PARAM_FULL, params)]
    if run.dtype != torch.float32:
        masters = getattr(optimizer, "fp32_partitioned_groups_flat", None)  # stage 3 hands them over for each step
        masters = masters or [p for group in getattr(inner, "param_groups", ()) for p in group["params"]]
        found.append(tensors_row(Buffer.PARAM_MASTER, masters))
    return found + state_rows(inner)
