"""DeepSpeed on a rank of ``verify``: the model is built on the device, at stage 3 under ``zero.Init``."""

from __future__ import annotations

from importlib import import_module

import torch

from zeroplan.core.buffers import Buffer
from zeroplan.engines.torch_trainer import engine_step, state_rows, tensors_row
from zeroplan.engines.verification import Row, Trainer, TrainingRun


def build(run: TrainingRun) -> Trainer:
    """Build the engine by ``deepspeed.initialize``."""
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed(dist_backend="nccl" if run.device.type == "cuda" else "gloo")
    if run.stage == 3:
        import_module("torch._dynamo")  # zero.Init replaces torch.tensor, whose signature dynamo checks when first imported
        with deepspeed.zero.Init(config_dict_or_path=run.ds_config, dtype=run.dtype):
            model = run.make_model(run.dtype)
    else:
        with run.device:
            model = run.make_model(run.dtype)
    run.mark("load", "init")
    model = run.prepare(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=run.ds_config, model_parameters=trainable)
    run.mark("init", "forward")

    def rows() -> list[Row]:
        inner = getattr(optimizer, "optimizer", optimizer)
        params = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
        found = [tensors_row(Buffer.PARAM_SHARD if run.stage == 3 else Buffer.PARAM_FULL, params)]
        if run.dtype != torch.float32:
            masters = [p for group in getattr(inner, "param_groups", ()) for p in group["params"]]
            found.append(tensors_row(Buffer.PARAM_MASTER, masters))
        return found + state_rows(inner)

    return Trainer(engine_step(run, engine), rows)
