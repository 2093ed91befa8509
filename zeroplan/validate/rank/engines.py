"""Builds a job's model under its engine, gives its training step, and names the tensors that the engine keeps.

Each set-up is the one that the plan describes: the included runtime gets its model from host memory; DeepSpeed builds it on
the device (under ``zero.Init`` at stage 3); FSDP2 and DDP hold fp32 parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.optimizers import OPTIMIZERS
from zeroplan.validate.job import VerifyJob
from zeroplan.validate.rank.models import DTYPES, loss_of, make_model, prepare
from zeroplan.validate.rank.torch_optimizers import make_optimizers

#: Rows as (buffer, unit, place, bytes).
Rows = list[tuple[str, str, str, int]]
Mark = Callable[[str, str], None]
Count = Callable[[int], None]
#: The optimizers' states by their keys.
_STATES = {state.state_key: state.buffer for row in OPTIMIZERS.values() for state in row.states}


@dataclass(slots=True)
class Trained:
    """A model ready to train. `step(batch)` is one optimizer step; `rows()` what the engine keeps between two steps.

    `owned` says that the rows are all that the engine owns, each at its peak; `where()` what it is doing, for messages;
    `pinned()` the bytes of host memory that it has pinned without torch.
    """

    step: Callable[[dict[str, torch.Tensor]], torch.Tensor]
    rows: Callable[[], Rows]
    owned: bool
    close: Callable[[], None]
    where: Callable[[], str]
    pinned: Callable[[], int] = lambda: 0


def build(job: VerifyJob, device: torch.device, mark: Mark, count: Count | None = None) -> Trained:
    """The engine's training step. `mark(phase, next)` is called as phases end, `count(bytes)` (fewer: negative) as the
    included runtime takes memory that no operator returns.
    """
    if job.engine == "zeroplan":
        return _runtime(job, device, mark, count)
    return {"deepspeed": _deepspeed, "fsdp2": _fsdp2, "ddp": _ddp}[job.engine](job, device, mark)


def _runtime(job: VerifyJob, device: torch.device, mark: Mark, count: Count | None) -> Trained:
    import zeroplan_runtime

    model = prepare(job, make_model(job, DTYPES[job.dtype], cheap=True))
    mark("load", "init")
    engine, *_ = zeroplan_runtime.initialize(model=model, config=job.ds_config, device=device)
    mark("init", "forward")

    engine.arena.on_resize = count

    def rows() -> Rows:
        return [(row["buffer"], row["unit"], row["place"], row["peak"]) for row in engine.arena.measurement()]

    def close() -> None:
        if engine.model_states.nvme is not None:  # files stay on the disk of a process that ends as a rank's does
            engine.destroy()
        if engine.watchdog is not None:
            engine.watchdog.stop()
        for parameter in engine.module.parameters():  # hooks hold the units, which hold the parameters, through C++
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).copy():
                parameter._post_accumulate_grad_hooks.pop(hook)

    def pinned() -> int:
        return int(engine.arena.peak(Place.PINNED))

    return Trained(_engine_step(job, engine, mark), rows, True, close, lambda: str(engine.schedule.where), pinned)


def _engine_step(job: VerifyJob, engine: Any, mark: Mark) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for micro in range(job.grad_accum):
            loss = loss_of(engine(**batch))
            mark("forward", "backward")
            engine.backward(loss)
            mark("backward", "step")
            engine.step()
            mark("step", "forward") if micro + 1 < job.grad_accum else None
        return loss

    return step


def _deepspeed(job: VerifyJob, device: torch.device, mark: Mark) -> Trained:
    deepspeed = import_module("deepspeed")
    dtype = DTYPES[job.dtype]
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    if job.stage == 3:
        import_module("torch._dynamo")  # zero.Init replaces torch.tensor, whose signature dynamo checks when first imported
        with deepspeed.zero.Init(config_dict_or_path=job.ds_config, dtype=dtype):
            model = make_model(job, dtype)
    else:
        with device:
            model = make_model(job, dtype)
    mark("load", "init")
    model = prepare(job, model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=job.ds_config, model_parameters=trainable)
    mark("init", "forward")

    def rows() -> Rows:
        inner = getattr(optimizer, "optimizer", optimizer)
        masters = [p for group in getattr(inner, "param_groups", ()) for p in group["params"]]
        full = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
        kept = Buffer.PARAM_SHARD if job.stage == 3 else Buffer.PARAM_FULL
        found = [(kept.value, "", _place(full), _bytes(full))]
        if job.dtype != "fp32":
            found.append((Buffer.PARAM_MASTER.value, "", _place(masters), _bytes(masters)))
        return found + _state_rows(inner)

    return Trained(_engine_step(job, engine, mark), rows, False, lambda: None, lambda: "")


def _fsdp2(job: VerifyJob, device: torch.device, mark: Mark) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from zeroplan_runtime.units import find_blocks

    with torch.device("meta"):
        model = make_model(job, torch.float32)
    model = prepare(job, model)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "reshard_after_forward": job.stage == 3,
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[job.dtype], reduce_dtype=torch.float32),
    }
    for block in find_blocks(model).values():
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    mark("load", "init")
    return _torch_loop(job, model, mark, Buffer.PARAM_SHARD)


def _ddp(job: VerifyJob, device: torch.device, mark: Mark) -> Trained:
    with device:
        model = make_model(job, torch.float32)
    model = prepare(job, model).to(device)
    if dist.get_world_size() > 1:
        ids = [device.index] if device.type == "cuda" else None
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    mark("load", "init")
    return _torch_loop(job, model, mark, Buffer.PARAM_FULL)


def _torch_loop(job: VerifyJob, model: Any, mark: Mark, kept: Buffer) -> Trained:
    """torch's optimizer with clipping around an FSDP2 or DDP model; autocast for DDP's fp32 parameters."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizers = make_optimizers(job.optimizer, trainable)
    mark("init", "forward")
    dtype = DTYPES[job.dtype]
    mixed = job.engine == "ddp" and dtype != torch.float32
    autocast = torch.autocast(next(model.parameters()).device.type, dtype=dtype, enabled=mixed)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for micro in range(job.grad_accum):
            _sync_gradients(model, micro + 1 == job.grad_accum)
            with autocast:
                loss = loss_of(model(**batch))
            mark("forward", "backward")
            torch.autograd.backward(loss)
            mark("backward", "step")
        torch.nn.utils.clip_grad_norm_([p for _, p in trainable], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    def rows() -> Rows:
        params = list(model.parameters())
        return [(kept.value, "", _place(params), _bytes(params)), *_state_rows(*optimizers)]

    return Trained(step, rows, False, lambda: None, lambda: "")


def _sync_gradients(model: Any, last: bool) -> None:
    """Only the last micro batch reduces gradients across the ranks."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif hasattr(model, "require_backward_grad_sync"):
        model.require_backward_grad_sync = last


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _bytes(tensors: Iterable[Any]) -> int:
    """Bytes of different tensors, this rank's part of those that are distributed."""
    different = {id(tensor): _local(tensor) for tensor in tensors}
    return sum(local.numel() * local.element_size() for local in different.values())


def _place(tensors: Iterable[Any]) -> str:
    first = next(iter(tensors), None)
    if first is None or _local(first).device.type != "cpu":
        return "hbm"
    return "pinned" if torch.cuda.is_available() and _local(first).is_pinned() else "dram"


def _state_rows(*optimizers: Any) -> Rows:
    found = []
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    for key, buffer in _STATES.items():
        tensors = [state[key] for state in states if isinstance(state.get(key), torch.Tensor)]
        if tensors:
            found.append((buffer.value, "", _place(tensors), _bytes(tensors)))
    return found
