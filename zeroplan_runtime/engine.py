"""The Engine: what users train with, by DeepSpeed's names. It ties units, schedule, landing and optimizer together."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroplan.core.buffers import Phase
from zeroplan.core.errors import BadInput
from zeroplan.core.layout import RuntimeSetup
from zeroplan_runtime.arena import DTYPES, Arena
from zeroplan_runtime.comm import Ranks
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.landing import attach
from zeroplan_runtime.optim.groups import ZeroOptimizer
from zeroplan_runtime.optim.step import Outcome, Stepper
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.store import Store
from zeroplan_runtime.units import Policy, cast_floating, find_units

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("zeroplan_runtime")


class Engine(nn.Module):
    """A model under ZeRO. Made by :func:`zeroplan_runtime.initialize`.

    One step is, for each micro batch, ``loss = engine(batch)``, ``engine.backward(loss)``, ``engine.step()``; the last
    ``step`` of an accumulation updates the model.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RuntimeConfig,
        optimizer: ZeroOptimizer | None,
        *,
        ranks: Ranks,
        device: torch.device,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.config = config
        self.device = device
        self.ranks = ranks
        self.optimizer = optimizer
        self.lr_scheduler: Any = None
        self.scaler = config.loss_scaler()
        self.global_steps = 0
        self.micro_steps = 0
        self._applied = 0
        self._skipped = 0
        self._outcome: Outcome | None = None
        self._unsettled: Outcome | None = None
        self._boundary: bool | None = None

        setup = RuntimeSetup(
            ranks=ranks.count,
            stage=config.stage,
            param_dtype=config.dtype,
            reduce_dtype=config.reduce_dtype,
            accum_dtype=config.accum_dtype,
            optimizer=optimizer.layout_kind if optimizer is not None else "sgd",
            grad_accum=config.grad_accum,
            block_slots=config.ring,
        )
        groups = {id(p): i for i, g in enumerate(optimizer.param_groups if optimizer else ()) for p in g["params"]}
        for name, param in model.named_parameters():
            if param.requires_grad and optimizer is not None and id(param) not in groups:
                raise BadInput(f"parameter {name!r} is in no optimizer group", remedy="freeze it or add it to a group")
        self.arena = Arena(device)
        dtype = DTYPES[config.dtype]
        if any(p.is_floating_point() and p.dtype != dtype for p in model.parameters()):
            cast_floating(model, dtype)
        self.store = Store(find_units(model, groups, policy=policy, wide_numel=config.wide_numel), setup, ranks, self.arena)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self.schedule = Schedule(self.store)
        attach(self.schedule, direct=config.direct_linear)
        self.stepper: Stepper | None = None
        if optimizer is not None:
            self.stepper = Stepper(self.schedule, optimizer, clip=config.clip, may_skip=config.check_overflow)
            optimizer.take_step = self.step

    # ------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with its parameters gathered as needed."""
        self.schedule.begin_forward()
        if self.config.auto_cast:
            args, kwargs = _cast(args, DTYPES[self.config.dtype]), _cast(kwargs, DTYPES[self.config.dtype])
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradients of `loss`, divided by the accumulation steps as DeepSpeed does, averaged over the ranks.

        Returns:
            The loss divided by the accumulation steps.
        """
        self._settle()
        scaled = loss / self.config.grad_accum if self.config.grad_accum > 1 else loss
        self.schedule.boundary = self.is_gradient_accumulation_boundary()
        self.arena.phase = Phase.BACKWARD
        (scaled * self.scaler.scale if self.scaler.scale != 1.0 else scaled).backward()  # type: ignore[no-untyped-call]
        self.schedule.end_backward()
        return scaled

    def step(self) -> None:
        """Ends a micro batch; the last one of an accumulation updates the parameters and the learning rate."""
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        if self.stepper is None:
            raise BadInput("there is no optimizer", where="engine.step", remedy="name one in the config or pass one")
        self._settle()
        self.arena.phase = Phase.STEP
        self.schedule.where = "the optimizer's step"
        self.schedule.ticks += 1
        outcome = self.stepper.step(self._applied + 1, self.scaler.scale)
        self.schedule.gather_ahead()
        self.global_steps += 1
        self._outcome = self._unsettled = outcome
        if not self.config.check_overflow or self.device.type == "cpu":
            self._settle()

    def _settle(self) -> None:
        """Draws the conclusions of the last step, once its outcome is known: loss scale, step count, learning rate.

        The host waits here, at the next backward at the earliest, while the device still has a forward to do.
        """
        outcome, self._unsettled = self._unsettled, None
        if outcome is None:
            return
        skipped = self.config.check_overflow and outcome.skipped
        self.scaler.update(skipped)
        if skipped:
            self._skipped += 1
            logger.info("step %d skipped: infinite gradients; loss scale is %g", self.global_steps, self.scaler.scale)
            return
        self._applied += 1
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro batch is the last before the parameters are updated."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.config.grad_accum == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says it for the micro batches to come, instead of counting them."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated so far."""
        self.schedule.gradients_taken()

    # ------------------------------------------------------------------ questions

    @property
    def skipped_steps(self) -> int:
        """Steps that infinite gradients prevented."""
        self._settle()
        return self._skipped

    @property
    def loss_scale(self) -> float:
        """The present factor on the loss."""
        self._settle()
        return self.scaler.scale

    @property
    def cur_scale(self) -> float:
        """The same, by DeepSpeed's name."""
        return self.loss_scale

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None when neither clipping nor checks need it."""
        if self._outcome is None or not (self.config.clip or self.config.check_overflow):
            return None
        return self._outcome.norm

    def get_lr(self) -> list[float]:
        """The groups' learning rates for the next step."""
        self._settle()
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def gradient_accumulation_steps(self) -> int:
        """Micro batches a step."""
        return self.config.grad_accum

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples a micro batch and rank."""
        return self.config.micro_batch

    def train_batch_size(self) -> int:
        """Samples a step over all ranks."""
        return self.config.micro_batch * self.config.grad_accum * self.ranks.count

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.config.stage

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks.count

    # ------------------------------------------------------------------ whole parameters

    def wait_parameters(self) -> None:
        """Makes the current stream wait until every gather begun after the last step is done.

        Forwards wait by themselves. This is for reading parameters directly at stages 0 to 2.
        """
        self.schedule.wait_gathered()

    @contextmanager
    def gathered(self, name: str = "root") -> Iterator[None]:
        """Within it, the parameters of one unit (``engine.unit_names()``) hold their whole values, for reading."""
        unit = next((u for u in self.store.units if u.name == name), None)
        if unit is None:
            raise BadInput(f"there is no unit {name!r}", where="gathered", remedy="see engine.unit_names()")
        self.schedule.gather(unit)
        unit.param_slot.ready.wait(self.schedule.compute)
        busy, unit.param_slot.busy = unit.param_slot.busy, True
        try:
            yield
        finally:
            unit.param_slot.busy = busy
            unit.param_slot.free.record(self.schedule.compute)

    def unit_names(self) -> list[str]:
        """The units that the model was divided into."""
        return [unit.name for unit in self.store.units]

    def module_state_dict(self) -> dict[str, torch.Tensor] | None:
        """All parameters and persistent buffers, whole, in the model's dtype, on the CPU of the first rank; else None.

        Every rank must call it. Tied parameters appear under each of their names, sharing memory.
        """
        keep = self.ranks.rank == 0
        values: dict[int, torch.Tensor] = {}
        for unit in self.store.units:
            with self.gathered(unit.name):
                if keep:
                    for flat in unit.flats():
                        values.update((id(p), p.detach().to("cpu", copy=True)) for p in flat.params)
        if not keep:
            return None
        state: dict[str, torch.Tensor] = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            state[name] = values[id(param)] if id(param) in values else param.detach().to("cpu", copy=True)
        for prefix, module in self.module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    state[f"{prefix}.{name}" if prefix else name] = buffer.detach().to("cpu", copy=True)
        return state


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
