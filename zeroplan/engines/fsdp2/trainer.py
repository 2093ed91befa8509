"""FSDP2 on a rank of ``verify``: `fully_shard` on each block and the root, parameters filled after they are sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from zeroplan.core.buffers import Buffer
from zeroplan.engines.fsdp2 import trainer_mesh
from zeroplan.engines.torch_mesh import passes_of
from zeroplan.engines.torch_trainer import torch_loop
from zeroplan.engines.verification import Trainer, TrainingRun


def build(run: TrainingRun) -> Trainer:
    """Shard the model with `fully_shard`; stage 3 reshards after the forward, stage 2 does not."""
    mesh = trainer_mesh.Fsdp2Mesh.of(run.layout, run.device)
    with torch.device("meta"):
        model = run.make_model(torch.float32)
    model = run.prepare(model)
    trainer_mesh.split(model, mesh, run.device)
    options: dict[str, Any] = {
        "reshard_after_forward": run.stage == 3,
        "mp_policy": MixedPrecisionPolicy(param_dtype=run.dtype, reduce_dtype=torch.float32),
    }
    trainer_mesh.shard(model, mesh, options)
    model.to_empty(device=run.device)
    trainer_mesh.fill(model)
    run.mark("load", "init")
    return torch_loop(
        run,
        model,
        Buffer.PARAM_SHARD,
        autocast=False,
        passes=passes_of(run.layout, mesh.context),
        reduced=partial(trainer_mesh.scale_experts, model, run.layout),
    )
