"""``deepspeed.initialize``."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from zeroplan.ds_config.source import load_source
from zeroplan_runtime.api import OptimizerFactory, make_engine
from zeroplan_runtime.compat.deepspeed import comm, ops
from zeroplan_runtime.compat.deepspeed.config import DeepSpeedConfig, Source
from zeroplan_runtime.compat.deepspeed.engine import DeepSpeedEngine, LossScalerView
from zeroplan_runtime.compat.deepspeed.leniency import as_deepspeed_reads
from zeroplan_runtime.compat.deepspeed.owners import own
from zeroplan_runtime.compat.deepspeed.refusals import Refusal, refusing
from zeroplan_runtime.compat.deepspeed.zero import mark
from zeroplan_runtime.optim.zero_optimizer import Params, ZeroOptimizer

logger = logging.getLogger("zeroplan_runtime")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    model_parameters: Params | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Runs ``deepspeed.initialize`` with the included runtime; see :func:`zeroplan_runtime.initialize`.

    Args:
        args: may hold the path of the config as ``deepspeed_config``.
        model: any module.
        optimizer: a torch optimizer, or a function that makes one from parameters.
        model_parameters: what is trained; every trainable parameter by default.
        training_data: a dataset, for which a loader is returned.
        lr_scheduler: a schedule, or a function that makes one from the optimizer. A schedule needs the optimizer it is of.
        distributed_port, mesh_param: have no effect.
        mpu: gives the group of the data-parallel ranks; it must not split the model.
        dist_init_required: False leaves torch.distributed alone.
        collate_fn: the loader's.
        config, config_params: a ds_config as a dict, a path or base64 text.

    Returns:
        Engine, optimizer, data loader and learning-rate schedule; those that do not exist are None.

    Raises:
        Refusal: for what DeepSpeed refuses, and for what this runtime does not do; one line, with the remedy.
    """
    if model is None or not isinstance(model, nn.Module):
        raise Refusal("deepspeed.initialize requires a model", where="model", remedy="give an nn.Module")
    if isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler) and lr_scheduler.optimizer is not optimizer:
        logger.warning(
            "lr_scheduler: it schedules another optimizer than the engine's and so changes no learning rate here; "
            "give that optimizer too, or a function that makes the schedule"
        )
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise Refusal("there is no model parallelism", where="mpu", remedy="let each rank hold the whole model")
    source = _config(args, config if config is not None else config_params)
    comm.init_distributed(dist_init_required=dist_init_required)
    theirs = DeepSpeedConfig(source, mpu)
    chosen = optimizer if optimizer is not None else _named(theirs, model, model_parameters)
    own_kind = not isinstance(optimizer, torch.optim.Optimizer) and optimizer is not None and callable(optimizer)
    made: list[torch.optim.Optimizer] = [chosen] if isinstance(chosen, torch.optim.Optimizer) else []
    if own_kind:
        factory: Any = optimizer

        def remembered(params: Any) -> torch.optim.Optimizer:
            made.append(factory(params))
            return made[0]

        chosen = remembered
    with refusing():
        engine, ours, _, schedule = make_engine(
            DeepSpeedEngine,
            model=model,
            config=as_deepspeed_reads(source, trains=chosen is not None or bool(theirs.optimizer_name)),
            model_parameters=model_parameters,
            optimizer=chosen,
            lr_scheduler=lr_scheduler,
            group=mpu.get_data_parallel_group() if mpu is not None else None,
        )
    engine._config, engine.collate_fn = theirs, collate_fn
    engine.training_dataloader = engine.deepspeed_io(training_data) if training_data is not None else None
    own(engine)
    if engine.zero_optimization_stage() >= 3:
        mark(engine)
    return engine, _returned(engine, ours, made), engine.training_dataloader, schedule


def _config(args: Any, config: Source | None) -> dict[str, Any]:
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if named is not None and config is not None:
        raise Refusal("there are two configs: deepspeed_config of args, and config", where="config", remedy="give one")
    source = named if named is not None else config
    if source is None:
        raise Refusal("there is no ds_config", where="config", remedy="give config=, or --deepspeed_config")
    if isinstance(source, dict) and source.get("steps_per_print") == math.inf:
        source = {**source, "steps_per_print": None}  # accelerate's way to say never; JSON has no such number
    with refusing():
        return load_source(source)[0]


def _named(config: DeepSpeedConfig, model: nn.Module, params: Params | None) -> ZeroOptimizer | None:
    """The optimizer that the config names, as DeepSpeed's class; None for one that has no class of DeepSpeed's here."""
    classes = ops.BY_TYPE.get(config.optimizer_name or "")
    trainable = [param for param in model.parameters() if param.requires_grad]
    if classes is None or not trainable:
        return None
    hyper = dict(config.optimizer_params or {})
    mode = hyper.pop("adam_w_mode", True)
    if "max_grad_norm" in hyper:
        raise Refusal("'max_grad_norm' is not a parameter", where="optimizer.params", remedy="use gradient_clipping")
    if config.optimizer_name == "adam":
        hyper["adamw_mode" if config.zero_config.offload_optimizer else "adam_w_mode"] = mode
    kind: Any = classes[bool(config.zero_config.offload_optimizer)]
    made: ZeroOptimizer = kind(params if params is not None else trainable, **hyper)
    return made


def _returned(engine: DeepSpeedEngine, ours: ZeroOptimizer | None, made: list[torch.optim.Optimizer]) -> Any:
    """Returns the optimizer that DeepSpeed returns: the user's own where it wraps nothing (stage 0 in fp32), else ours."""
    if ours is None:
        return None
    visible: Any = ours
    scaler: Any = LossScalerView(engine)
    visible.loss_scaler = visible.loss_scale_config = scaler
    visible.dynamic_loss_scale = scaler.dynamic_loss_scale
    visible.optimizer = made[0] if made else ours
    if not made or made[0] is ours:
        return ours
    if engine.zero_optimization_stage() or engine.fp16_enabled() or engine.bfloat16_enabled():
        return ours
    theirs: Any = made[0]
    for name in ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        setattr(theirs, name, getattr(ours, name))
    return theirs


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config`` to a parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="train with DeepSpeed (here: with zeroplan's runtime)")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the path of a ds_config.json")
    return parser
