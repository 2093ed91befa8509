"""DeepSpeed on a rank of ``verify``: the model is built on the device, at stage 3 under ``zero.Init``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch

from zeroplan.ds_config.batch import MICRO
from zeroplan.engines.deepspeed.trainer_mesh import Mesh, spread_evenly
from zeroplan.engines.deepspeed.trainer_rows import rows_of
from zeroplan.engines.torch_trainer import engine_step
from zeroplan.engines.verification import Trainer, TrainingRun


def build(run: TrainingRun) -> Trainer:
    """Build the engine by ``deepspeed.initialize``."""
    deepspeed = library(run.device)
    if run.layout.pp > 1:
        from zeroplan.engines.deepspeed.trainer_pipeline import build_stage

        return build_stage(run, deepspeed)
    with construction(deepspeed, run.stage, dict(run.ds_config), run.dtype, run.device):
        model = run.make_model(run.dtype)
    if run.stage == 3:
        fill_shards(model)
    run.mark("load", "init")
    model = run.prepare(model)
    mesh = Mesh(run.layout, int(run.ds_config[MICRO]))
    mpu = mesh.join(model)
    trainable = filter(lambda p: p.requires_grad, model.parameters())  # AutoEP's layers bring others before they are listed
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=dict(run.ds_config), model_parameters=trainable, mpu=mpu)
    del model
    if run.layout.auto_ep:
        spread_evenly(engine)
    run.mark("init", "forward")
    step = engine_step(run, engine)
    return Trainer(lambda batch: step(mesh.part(batch)), lambda: rows_of(run, engine, optimizer), close=mesh.leave)


def library(device: torch.device) -> Any:
    """Import DeepSpeed for a device, and let it join the ranks."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, by the first import
    deepspeed = import_module("deepspeed")
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    return deepspeed


def construction(
    deepspeed: Any, stage: int, config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> AbstractContextManager[Any]:
    """Return the context in which a model is built: on the device, or at stage 3 sharded at once."""
    if stage < 3:
        return device
    import_module("torch._dynamo")  # zero.Init replaces torch.tensor, whose signature dynamo checks when first imported
    found: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype)
    return found


@torch.no_grad()
def fill_shards(model: torch.nn.Module) -> None:
    """Fill the shards of matrices with random values.

    zero.Init shards a layer once it is made, before transformers initialises it, so what a layer leaves to transformers, such
    as experts, is whatever was in memory.
    """
    each: Iterable[Any] = model.parameters()
    for parameter in each:
        shard = getattr(parameter, "ds_tensor", None)
        if shard is not None and shard.numel() and len(parameter.ds_shape) > 1:
            shard.normal_(0, 0.02)
