"""FSDP2 on a rank of ``verify``: `fully_shard` on each block and the root, parameters filled after they are sharded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from zeroplan.core.buffers import Buffer
from zeroplan.engines.fsdp2 import trainer_mesh
from zeroplan.engines.torch_mesh import passes_of
from zeroplan.engines.torch_stages import LazyStep, StageModel, schedule_on, stages_of
from zeroplan.engines.torch_trainer import staged_loop, torch_loop
from zeroplan.engines.verification import Trainer, TrainingRun


def build(run: TrainingRun) -> Trainer:
    """Shard the model, or this rank's pipeline stages, with `fully_shard`; stage 3 reshards after the forward, stage 2 does
    not.
    """
    layout, mesh = run.layout, trainer_mesh.Fsdp2Mesh.of(run.layout, run.device)

    def make() -> Any:
        with torch.device("meta"):
            model = run.make_model(run.kept_dtype)
        model = run.prepare(model)
        trainer_mesh.split(model, mesh, run.device)
        return model

    models = stages_of(run, make) if layout.pp > 1 else [make()]
    options: dict[str, Any] = {
        "reshard_after_forward": run.stage == 3,
        "mp_policy": MixedPrecisionPolicy(param_dtype=run.dtype, reduce_dtype=torch.float32),
    }
    for model in models:
        trainer_mesh.shard(model, mesh, options, _blocks(model))
        model.to_empty(device=run.device)
        trainer_mesh.fill(model)
    run.mark("load", "init")
    passes = passes_of(layout, mesh.context)

    def reduced() -> None:
        for model in models:
            trainer_mesh.scale_experts(model, layout)

    if layout.pp == 1:
        return torch_loop(run, models[0], Buffer.PARAM_SHARD, autocast=False, passes=passes, reduced=reduced)
    pipeline = mesh.dense["pp"].get_group()
    step = LazyStep(run, lambda shape: schedule_on(models, shape, pipeline, run.device), passes)
    return staged_loop(run, models, Buffer.PARAM_SHARD, step, pipeline, reduced)


def _blocks(model: nn.Module) -> Iterable[nn.Module] | None:
    """Return the blocks of a stage; a single one is a group of its own, too, as torchtitan has it."""
    return list(model.model.layers) if isinstance(model, StageModel) else None
