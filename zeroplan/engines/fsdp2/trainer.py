"""FSDP2 on a rank of ``verify``: `fully_shard` on each block and the root, parameters filled after they are sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zeroplan.core.buffers import Buffer
from zeroplan.engines.torch_trainer import torch_loop
from zeroplan.engines.verification import Trainer, TrainingRun
from zeroplan_runtime.units import find_blocks


def build(run: TrainingRun) -> Trainer:
    """Shard the model with `fully_shard`; stage 3 reshards after the forward, stage 2 does not."""
    with torch.device("meta"):
        model = run.make_model(torch.float32)
    model = run.prepare(model)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(run.device.type, (dist.get_world_size(),)),
        "reshard_after_forward": run.stage == 3,
        "mp_policy": MixedPrecisionPolicy(param_dtype=run.dtype, reduce_dtype=torch.float32),
    }
    for block in find_blocks(model).values():
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device=run.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    run.mark("load", "init")
    return torch_loop(run, model, Buffer.PARAM_SHARD, autocast=False)
