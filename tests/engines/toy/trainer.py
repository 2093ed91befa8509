"""The toy on a rank of ``verify``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroplan.core.buffers import Buffer
from zeroplan.engines.torch_trainer import torch_loop
from zeroplan.engines.verification import Trainer, TrainingRun


def build(run: TrainingRun) -> Trainer:
    with run.device:
        model = run.make_model(torch.float32)
    model = run.prepare(model).to(run.device)
    if dist.get_world_size() > 1:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    run.mark("load", "init")
    return torch_loop(run, model, Buffer.PARAM_FULL, autocast=run.dtype != torch.float32)
