"""The training loops that trainers share on a rank, and the rows of an engine's parameters and optimizer states.

Imports torch: only trainers import this module, and only a rank's process imports those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed import ProcessGroup

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import OPTIMIZERS, find_optimizer
from zeroplan.engines.torch_mesh import Passes, by_mesh, clip, whole_loss
from zeroplan.engines.torch_rank import muon_takes
from zeroplan.engines.verification import LEARNING_RATE, Row, Trainer, TrainingRun

#: The optimizers' states by their keys.
_STATES = {state.state_key: state.buffer for row in OPTIMIZERS.values() for state in row.states}
_STATES |= dict.fromkeys(("row_var", "col_var"), Buffer.OPTIM_FACTORED)  # of a matrix, where a vector has its variance

Step = Callable[[dict[str, torch.Tensor]], torch.Tensor | None]


def engine_step(run: TrainingRun, engine: Any, passes: Passes = nullcontext) -> Step:
    """Return the loop of an engine with DeepSpeed's calls: ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``.

    Args:
        run: what ``verify`` asks for.
        passes: what a micro batch's forward and backward run in.
    """

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for micro in range(run.grad_accum):
            with passes(batch) as given:
                loss = run.loss_of(engine(**given))
                run.mark("forward", "backward")
                engine.backward(loss)
            run.mark("backward", "step")
            engine.step()
            if micro + 1 < run.grad_accum:
                run.mark("step", "forward")
        return whole_loss(loss)

    return step


def torch_loop(
    run: TrainingRun,
    model: Any,
    kept: Buffer,
    *,
    autocast: bool,
    passes: Passes = nullcontext,
    reduced: Callable[[], None] = lambda: None,
) -> Trainer:
    """Return the loop of plain torch around a wrapped model: ``torch.optim``'s optimizers, with clipping.

    Args:
        run: what ``verify`` asks for.
        model: wrapped by FSDP2 or DDP.
        kept: what the model's parameters are between two steps.
        autocast: whether the forward runs under ``torch.autocast``.
        passes: what a micro batch's forward and backward run in.
        reduced: called when a step's gradients are reduced, before they are clipped.
    """

    def micro_batches(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for micro in range(run.grad_accum):
            if micro:
                run.mark("backward", "step")
            _sync_gradients(model, micro + 1 == run.grad_accum)
            with passes(batch) as given:
                with torch.autocast(run.device.type, dtype=run.dtype, enabled=autocast):
                    loss = run.loss_of(model(**given))
                run.mark("forward", "backward")
                torch.autograd.backward(loss)
        return whole_loss(loss)

    return staged_loop(run, [model], kept, micro_batches, None, reduced)


def staged_loop(
    run: TrainingRun,
    models: Sequence[Any],
    kept: Buffer,
    micro_batches: Step,
    pipeline: ProcessGroup | None,
    reduced: Callable[[], None],
) -> Trainer:
    """Return the loop of plain torch around a rank's pipeline stages: one optimizer of all of them, and their norm clipped.

    Args:
        run: what ``verify`` asks for.
        models: the rank's stages, wrapped.
        kept: what the models' parameters are between two steps.
        micro_batches: runs the forwards and backwards of a step.
        pipeline: the ranks that have the other stages, which share the norm; None for a whole model.
        reduced: called when a step's gradients are reduced, before they are clipped.
    """
    parameters = [p for model in models for p in model.parameters()]
    trainable = [(name, p) for model in models for name, p in model.named_parameters() if p.requires_grad]
    optimizers = make_optimizers(run.optimizer, trainable)
    run.mark("init", "forward")

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        loss = micro_batches(batch)
        run.mark("backward", "step")
        reduced()
        clip([p for _, p in trainable], 1.0, pipeline)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    def rows() -> list[Row]:
        return [tensors_row(kept, parameters), *state_rows(*optimizers)]

    return Trainer(step, rows)


def _sync_gradients(model: Any, last: bool) -> None:
    """Let only the last micro batch reduce gradients across the ranks."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif hasattr(model, "require_backward_grad_sync"):
        model.require_backward_grad_sync = last


# ---------------------------------------------------------------------- optimizers


def make_optimizers(name: str, parameters: Iterable[tuple[str, Any]]) -> list[torch.optim.Optimizer]:
    """The optimizers that step together, fused where torch's class can be.

    Args:
        name: a row of the optimizer table.
        parameters: trainable parameters with their full names.

    Raises:
        BadInput: for an optimizer that ``torch.optim`` lacks.
    """
    row, named = find_optimizer(name), list(parameters)
    if not row.rest:
        return [_make_optimizer(row.name, [p for _, p in named])]
    matrices = [p for full, p in named if muon_takes(full, p.dim())]
    others = [p for full, p in named if not muon_takes(full, p.dim())]
    return [_make_optimizer(kind, params) for kind, params in ((row.name, matrices), (row.rest, others)) if params]


def _make_optimizer(name: str, parameters: list[Any]) -> torch.optim.Optimizer:
    kind = OPTIMIZERS[name].torch
    if kind is None or not hasattr(torch.optim, kind.name):
        raise BadInput(f"torch has no optimizer {name!r}", where="--optimizer", remedy="verify runs torch.optim's")
    fused = {"fused": True} if kind.fused else {}
    groups = by_mesh(parameters)  # a fused step takes distributed tensors of one mesh
    given: list[Any] = parameters if len(groups) < 2 else [{"params": group} for group in groups]
    optimizer = getattr(torch.optim, kind.name)(given, lr=LEARNING_RATE, **fused, **kind.params)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


# ---------------------------------------------------------------------- rows


def tensors_row(buffer: Buffer, tensors: list[Any]) -> Row:
    """Return one row with the bytes of different tensors; of a distributed tensor this rank's part."""
    different = {id(tensor): _local(tensor) for tensor in tensors}
    return (buffer.value, "", _place(tensors), sum(one.numel() * one.element_size() for one in different.values()))


def state_rows(*optimizers: Any) -> list[Row]:
    """A row for each state that torch's optimizers have made."""
    found = []
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    for buffer in dict.fromkeys(_STATES.values()):
        keys = [key for key, kept in _STATES.items() if kept is buffer]
        tensors = [state[key] for state in states for key in keys if isinstance(state.get(key), torch.Tensor)]
        if tensors:
            found.append(tensors_row(buffer, tensors))
    return found


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _place(tensors: Iterable[Any]) -> str:
    first = next(iter(tensors), None)
    if first is None or _local(first).device.type != "cpu":
        return "hbm"
    return "pinned" if torch.cuda.is_available() and _local(first).is_pinned() else "dram"
