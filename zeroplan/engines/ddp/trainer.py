"""DDP on a rank of ``verify``: fp32 parameters on the device, 16-bit arithmetic by autocast."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroplan.core.buffers import Buffer
from zeroplan.engines.torch_trainer import torch_loop
from zeroplan.engines.verification import Trainer, TrainingRun


def build(run: TrainingRun) -> Trainer:
    """Wrap the model in DistributedDataParallel; a single rank trains it unwrapped."""
    with run.device:
        model = run.make_model(run.kept_dtype)
    model = run.prepare(model).to(run.device)
    if dist.get_world_size() > 1:
        ids = [run.device.index] if run.device.type == "cuda" else None
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    run.mark("load", "init")
    return torch_loop(run, model, Buffer.PARAM_FULL, autocast=run.dtype != torch.float32)
