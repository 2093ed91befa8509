"""``initialize()`` makes an engine from a model and a ds_config."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import RUNTIME_OPTIMIZERS
from zeroplan_runtime.config import RuntimeConfig, read_config
from zeroplan_runtime.copy_engines import process_group_options
from zeroplan_runtime.engine import Engine
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.monitors.flops import make_flops_profiler
from zeroplan_runtime.monitors.monitor import make_monitor
from zeroplan_runtime.optim.schedules import make_schedule
from zeroplan_runtime.optim.zero_optimizer import Params, ZeroOptimizer
from zeroplan_runtime.rank_agreement import require_same_everywhere
from zeroplan_runtime.units import Policy

logger = logging.getLogger("zeroplan_runtime")

#: Makes an optimizer from the parameters that it is given.
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
AnyEngine = TypeVar("AnyEngine", bound=Engine)


def initialize(
    *,
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    model_parameters: Params | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    policy: Policy | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
) -> tuple[Engine, ZeroOptimizer | None, DataLoader[Any] | None, Any]:
    """Shards `model` over the ranks as `config` says and returns an engine that trains it. Every rank must call it.

    Args:
        model: any module with initialised parameters; they are moved to the device and cast as the config says.
        config: a ds_config as a dict, or the path of its JSON file.
        model_parameters: parameters or parameter groups for the config's optimizer; all trainable ones by default.
        optimizer: a ``torch.optim.AdamW``, ``Adam`` or ``SGD`` that replaces the config's, or a function that makes one
            from `model_parameters`; its groups and hyperparameters are used. Parameters in no group stay as they are.
        training_data: a dataset with a length; a loader is returned that gives each rank its own part, in micro batches.
        lr_scheduler: an object with ``step()``, or a function that makes one from the optimizer.
        collate_fn: the loader's, as in ``torch.utils.data.DataLoader``.
        policy: given a module's name and the module, whether it is a block unit; see
            :func:`zeroplan_runtime.units.find_blocks`.
        group: the process group of the ranks that share the model; all ranks by default.
        mesh: in place of `group`, all ranks by what they share. Its dimensions are named ``dp`` (or ``dp_shard``), ``cp``,
            ``ep``, ``tp`` and ``pp``; see Note [Mesh] in :mod:`zeroplan_runtime.mesh`.
        device: this rank's device; by default CUDA device ``LOCAL_RANK``, or the CPU without a GPU.

    Returns:
        Engine, optimizer, data loader and learning-rate schedule; those that do not exist are None.

    Raises:
        BadInput: when the model, the config or another argument is wrong or not supported.
    """
    return make_engine(
        Engine,
        model=model,
        config=config,
        model_parameters=model_parameters,
        optimizer=optimizer,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        policy=policy,
        group=group,
        mesh=mesh,
        device=device,
    )


def make_engine(
    kind: type[AnyEngine],
    *,
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    model_parameters: Params | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    policy: Policy | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
) -> tuple[AnyEngine, ZeroOptimizer | None, DataLoader[Any] | None, Any]:
    """Makes an engine of class `kind`, as :func:`initialize` does."""
    _require_usable(model, training_data, policy)
    if "zeroplan_runtime.techniques.transformer" in sys.modules:
        from zeroplan_runtime.techniques.transformer.models import warn_of_adapters

        warn_of_adapters(model)
    where = _device(device)
    ranks, settings = _join(where, config, group, mesh)
    if settings.without_effect and ranks.world.rank == 0:
        logger.warning("keys without effect in this runtime: %s", ", ".join(settings.without_effect))
    chosen = _optimizer(model, settings, model_parameters, optimizer)
    require_same_everywhere(model, settings, chosen, ranks)
    schedule = _schedule(settings, chosen, lr_scheduler)  # which may set the momentum that the engine makes room for
    engine = kind(model, settings, chosen, ranks=ranks, device=where, policy=policy)
    engine.lr_scheduler = schedule
    engine.monitor = make_monitor(settings, where, rank=0 if ranks.reports else 1, ranks=ranks.samples)
    engine.flops_profiler = make_flops_profiler(settings, where, rank=0 if ranks.reports else 1)
    return engine, chosen, _loader(training_data, settings, ranks, collate_fn), engine.lr_scheduler


def _ranks(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> MeshRanks:
    if mesh is None:
        return MeshRanks.of_group(group)
    if group is not None:
        raise BadInput("the mesh has the groups", where="group", remedy="give either group or mesh")
    if not isinstance(mesh, DeviceMesh):
        raise BadInput(
            f"a {type(mesh).__name__} is no DeviceMesh",
            where="mesh",
            remedy="make one by torch.distributed.init_device_mesh(type, sizes, mesh_dim_names=names)",
        )
    return MeshRanks.of_mesh(mesh)


def _require_usable(model: object, data: object, policy: object) -> None:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise BadInput(f"{what} is no nn.Module", where="model", remedy="give a built model with its weights")
    if data is not None and not hasattr(data, "__len__"):
        raise BadInput("has no length", where="training_data", remedy="give a dataset with len(), or load batches yourself")
    if policy is not None and not callable(policy):
        raise BadInput("cannot be called", where="policy", remedy="give a function of a module's name and the module")


def _device(device: torch.device | str | None) -> torch.device:
    try:
        where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:
        raise BadInput(f"{device!r} is no device", where="device", remedy="use cuda, cuda:0 or cpu") from None
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise BadInput("there is no GPU", where="device", remedy="use cpu")
        if ":" not in str(where):
            where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    return where


def _join(
    device: torch.device,
    config: Mapping[str, Any] | str | Path,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[MeshRanks, RuntimeConfig]:
    """Initialises torch.distributed under ``torchrun``, unless that has been done; returns the ranks and their settings."""
    if dist.is_initialized() or not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        ranks = _ranks(group, mesh)
        return ranks, read_config(config, ranks.samples)
    settings = read_config(config, int(os.environ["WORLD_SIZE"]))  # without a mesh each has samples of its own
    if device.type == "cuda":
        options = process_group_options() if settings.runtime_options.copy_engine_gathers else None
        dist.init_process_group("nccl", device_id=device, pg_options=options)
    else:
        dist.init_process_group("gloo")
    return _ranks(group, mesh), settings


def _optimizer(
    model: nn.Module,
    settings: RuntimeConfig,
    params: Params | None,
    given: torch.optim.Optimizer | OptimizerFactory | None,
) -> ZeroOptimizer | None:
    trainable = [p for p in model.parameters() if p.requires_grad]
    if given is not None and not isinstance(given, torch.optim.Optimizer):
        if not callable(given):
            raise BadInput(
                f"a {type(given).__name__} is no optimizer",
                where="optimizer",
                remedy="give a torch.optim.Optimizer, or a function that makes one from parameters",
            )
        given = given(trainable if params is None else params)  # type: ignore[arg-type]
    if isinstance(given, ZeroOptimizer):
        return given
    if given is not None:
        return ZeroOptimizer.from_torch(given)
    if settings.optimizer is None or not trainable:
        return None
    hyper = dict(settings.optimizer["params"])
    if "max_grad_norm" in hyper:
        raise BadInput("'max_grad_norm' is not a parameter", where="optimizer.params", remedy="use gradient_clipping")
    kind = str(settings.optimizer["type"]).lower()
    # DeepSpeed's "Adam" is AdamW unless adam_w_mode says otherwise.
    row = RUNTIME_OPTIMIZERS.get(kind)
    always = row is not None and row.runtime is not None and row.runtime.decoupled == row.name
    decoupled = bool(hyper.pop("adam_w_mode", True)) or always
    return ZeroOptimizer(params if params is not None else trainable, kind, hyper, decoupled=decoupled)


def _schedule(settings: RuntimeConfig, optimizer: ZeroOptimizer | None, given: Any) -> Any:
    if given is not None:
        if not hasattr(given, "step") and not callable(given):
            raise BadInput(
                f"a {type(given).__name__} is no schedule",
                where="lr_scheduler",
                remedy="give an object with step(), or a function that makes one from the optimizer",
            )
        made = given if hasattr(given, "step") and not isinstance(given, type) else given(optimizer)
        _require_step(made)
        return made
    if settings.scheduler is None or optimizer is None:
        return None
    return make_schedule(settings.scheduler["type"], settings.scheduler["params"], optimizer)


def _require_step(schedule: Any) -> None:
    """Checks that the engine can call the schedule's ``step()``.

    Raises:
        BadInput: when it needs an argument, such as the metric of ReduceLROnPlateau.
    """
    try:
        inspect.signature(schedule.step).bind()
    except ValueError:  # its signature is not known
        return
    except (AttributeError, TypeError) as fault:
        raise BadInput(
            f"the engine cannot call step() of a {type(schedule).__name__} after each step ({fault})",
            where="lr_scheduler",
            remedy="leave it out, make it of the optimizer that initialize() returns, and call its step yourself",
        ) from None


def _loader(
    data: Dataset[Any] | None, settings: RuntimeConfig, ranks: MeshRanks, collate_fn: Callable[..., Any] | None
) -> DataLoader[Any] | None:
    if data is None:
        return None
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks.samples, ranks.sample, shuffle=True)
    return DataLoader(data, settings.micro_batch, sampler=sampler, collate_fn=collate_fn, drop_last=settings.drop_last)
