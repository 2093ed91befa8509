"""The Engine: what users train with, by DeepSpeed's names. It ties units, schedule, landing and optimizer together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroplan.core.buffers import Phase
from zeroplan.core.errors import BadInput
from zeroplan.core.layout import UnitKind
from zeroplan.core.layout_setup import RuntimeSetup
from zeroplan.core.zero_config import OffloadDevice, OffloadOptimizer
from zeroplan.ds_config.runtime_offload_rules import require_offloadable
from zeroplan_runtime.arena import DTYPES, Arena
from zeroplan_runtime.audit import Audit
from zeroplan_runtime.checks import Guard, groups_of, refuse_copy, require_loss, require_model
from zeroplan_runtime.comm import Mark, Ranks
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.gradient_hooks import attach
from zeroplan_runtime.loss import attach_loss
from zeroplan_runtime.model_states import Store
from zeroplan_runtime.offload.activations import ActivationOffload
from zeroplan_runtime.offload.host_optimizer import HostOptimizer
from zeroplan_runtime.offload.host_setup import offload_optimizer, swap_files
from zeroplan_runtime.optim.step import Outcome, Stepper
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer
from zeroplan_runtime.pytree import cast_tensors
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.state_dict_hooks import StateDicts
from zeroplan_runtime.units import Policy, cast_floating, find_units
from zeroplan_runtime.watchdog import watch, weakly

logger = logging.getLogger("zeroplan_runtime")


class Engine(nn.Module):
    """A model under ZeRO. Made by :func:`zeroplan_runtime.initialize`.

    Its memory goes with the last reference to engine, model and optimizer, which refer to each other, at the garbage
    collector's next round; :meth:`destroy` gives it back at once.

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
        self._audit: Audit | None = None

        require_model(model)
        groups = groups_of(model, optimizer)
        if optimizer is not None and config.offload.optimizer.device is not OffloadDevice.NONE:
            require_offloadable(optimizer.kind)
        setup = RuntimeSetup.of(
            config.offload.optimizer if optimizer is not None else OffloadOptimizer(),
            config.offload.param,
            ranks=ranks.count,
            stage=config.stage,
            param_dtype=config.dtype,
            reduce_dtype=config.reduce_dtype,
            accum_dtype=config.accum_dtype,
            optimizer=optimizer.layout_kind if optimizer is not None else "sgd",
            grad_accum=config.grad_accum,
            block_slots=config.knobs.ring,
            delayed_update=config.offload.delayed_from > 0,
        )
        self.arena = Arena(device)
        dtype = DTYPES[config.dtype]
        if any(p.is_floating_point() and p.dtype != dtype for p in model.parameters()):
            cast_floating(model, dtype)
        units = find_units(model, groups, policy=policy, wide_numel=config.knobs.wide_numel)
        self.store = Store(units, setup, ranks, self.arena, swap_files(config.offload))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = ranks.from_first(buffer.to(device))
        self.schedule = Schedule(self.store)
        self._undo = [attach(self.schedule, direct=config.knobs.direct_linear)]
        if config.knobs.fused_loss:
            self._undo.append(attach_loss(model))
        self.activations: ActivationOffload | None = None
        if config.offload.checkpoints:
            blocks = [unit.module for unit in self.store.units if unit.layout.shape.kind is UnitKind.BLOCK]
            self.activations = ActivationOffload(blocks, self.arena)
            self._undo.append(self.activations.remove)
        self.guard = Guard(model, self.store)
        self.state_dicts = StateDicts(model, self.store, settled=self._settled, filled=self.guard.look_again)
        self._undo.append(self.state_dicts.remove)
        self._inside = False
        self._tail = Mark(device)
        self.watchdog = (
            watch(ranks.rank, ranks.count, weakly(self._where), config.knobs.timeout) if ranks.group is None else None
        )
        if self.watchdog is not None:
            ranks.explain = self.watchdog.diagnose
            weakref.finalize(self, self.watchdog.stop)
        self.stepper: Stepper | None = None
        self.host: HostOptimizer | None = None
        if optimizer is not None:
            self.stepper = Stepper(self.schedule, optimizer, clip=config.clip, may_skip=config.check_overflow)
            self.host = offload_optimizer(self.stepper, config.offload)
            optimizer.take_step = self.step
        self.arena.clear_cache()
        self.arena.take_workspaces(dtype)
        self.arena.make_room(unit.grad_lease for unit in self.store.units if unit.grad_lease is not None)
        self.guard.hold()

    # ------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with its parameters gathered as needed."""
        self.guard.require("engine")
        self.guard.require_parameters()
        self.state_dicts.refresh()
        self.schedule.begin_forward()
        if self.config.auto_cast:
            args, kwargs = cast_tensors((args, kwargs), DTYPES[self.config.dtype])
        saving = self.activations.saving() if self.activations is not None else nullcontext()
        with self._working(), self._watched(), saving:
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Gradients of `loss`, divided by the accumulation steps as DeepSpeed does, averaged over the ranks.

        Several backwards before one step add up. `retain_graph` lets another go through the same graph.

        Returns:
            The loss divided by the accumulation steps.

        Raises:
            BadInput: when `loss` is no number that came out of this model's forward with gradients, after a backward that
                failed, and for a second one where gradients can be reduced but once.
        """
        self.guard.require("engine.backward")
        self.guard.require_backward(once=self._reduces_once())
        require_loss(loss)
        self.settle()
        scaled = loss / self.config.grad_accum if self.config.grad_accum > 1 else loss
        self.schedule.boundary = self.is_gradient_accumulation_boundary()
        if self.stepper is not None:
            self.stepper.upcoming = self._applied + 1
        self.arena.phase = Phase.BACKWARD
        self.schedule.start_backward()
        with self.guard.going_back(boundary=self.schedule.boundary), self._working(), self._watched():
            whole = scaled * self.scaler.scale if self.scaler.scale != 1.0 else scaled
            whole.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self.schedule.end_backward()
        return scaled

    def _reduces_once(self) -> bool:
        """Whether what the reduction leaves cannot be added to: parts of whole gradients, or updates that have begun."""
        setup = self.store.setup
        early = self.host is not None and self.host.early is not None
        return early or (setup.shards_states and not setup.shards_grads)

    def _watched(self) -> AbstractContextManager[object]:
        """The audit of parameter reads, in the first micro batches at stage 3."""
        if self.micro_steps < self.config.knobs.audit_steps and self.store.setup.shards_params:
            self._audit = self._audit or Audit(self.store)
            return self._audit
        self._audit = None
        return nullcontext()

    def step(self) -> None:
        """Ends a micro batch; the last one of an accumulation updates the parameters and the learning rate."""
        self.guard.require("engine.step")
        boundary = self.is_gradient_accumulation_boundary()
        if boundary and self.stepper is None:
            trains = any(param.requires_grad for param in self.module.parameters())
            remedy = "name one in the config or pass one" if trains else "the model has no parameter to train"
            raise BadInput("there is no optimizer", where="engine.step", remedy=remedy)
        if boundary:
            self.guard.require_gradients()
        self.micro_steps += 1
        if not boundary or self.stepper is None:
            return
        self.state_dicts.refresh()
        self.settle()
        self.arena.phase = Phase.STEP
        self.schedule.where = "the optimizer's step"
        self.schedule.ticks += 1
        with self.guard.stepping(), self._working():
            outcome = self.stepper.step(self._applied + 1, self.scaler.scale)
            self.schedule.gather_ahead()
        self.global_steps += 1
        self._outcome = self._unsettled = outcome
        if not self.config.check_overflow or self.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Draws the conclusions of the last step, once its outcome is known: loss scale, step count, learning rate.

        The host waits here, at the next backward at the earliest, while the device still has a forward to do.
        """
        outcome, self._unsettled = self._unsettled, None
        if outcome is None:
            return
        if self.ranks.count > 1 and outcome.is_mixed:
            self.guard.refuse_mixed()
        skipped = self.config.check_overflow and outcome.skipped
        self.scaler.update(skipped)
        if skipped:
            self._skipped += 1
            logger.info("step %d skipped: infinite gradients; loss scale is %g", self.global_steps, self.scaler.scale)
            return
        self._applied += 1
        if self.optimizer is not None:
            self.optimizer.was_stepped()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def drain(self) -> None:
        """Returns when every update is in the masters and on its way to the parameters, those on the host included."""
        self.guard.require("engine", torn=True)
        self.state_dicts.refresh()
        self.settle()
        if self.host is not None:
            self.host.drain(self.schedule.compute)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro batch is the last before the parameters are updated."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.config.grad_accum == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says it for the micro batches to come, instead of counting them.

        Buffers and their dtypes follow the config's accumulation steps: give there how many there are about.
        """
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated so far."""
        self.guard.require("engine.zero_grad", torn=True)
        self.schedule.drop_gradients()
        self.guard.dropped()

    def destroy(self, *, keep_parameters: bool = False) -> None:
        """Gives all memory of the runtime back. A second call does nothing.

        The model's parameters are empty afterwards, or, with `keep_parameters`, whole in host memory and in the dtype in which
        they were trained: the model can be used, or given to :func:`zeroplan_runtime.initialize`, again. Every rank must then
        call it so.
        """
        if self.guard.is_destroyed:
            return
        kept = self._parameters_on_host() if keep_parameters else {}
        self.guard.let_go(emptied=not keep_parameters)
        with suppress(BadInput):  # that no loss scale is left is of no interest any more
            self.settle()
        if self.host is not None:
            self.host.close()
        if self.watchdog is not None:
            self.watchdog.stop()
            self.ranks.explain = None
        for undo in self._undo:
            undo()
        self.schedule.remove()
        self.schedule.drop_gradients()
        for unit in self.store.units:
            for flat in unit.flats():
                for param in flat.params:
                    value = kept.get(id(param))
                    param.data = torch.empty(0, dtype=param.dtype, device=self.device) if value is None else value
        self.stepper = self.host = self.schedule.host = self._outcome = self._audit = None
        self.store.drop()
        self.arena.release_host()

    def _parameters_on_host(self) -> dict[int, torch.Tensor]:
        self.guard.require("engine.destroy")
        self.drain()
        kept = {}
        for unit in self.store.units:
            with self.gathered(unit.name):
                kept.update({id(p): p.detach().to("cpu", copy=True) for flat in unit.flats() for p in flat.params})
        return kept

    __reduce_ex__ = refuse_copy

    # ------------------------------------------------------------------ questions

    @property
    def skipped_steps(self) -> int:
        """Steps that infinite gradients prevented."""
        self.settle()
        return self._skipped

    @property
    def loss_scale(self) -> float:
        """The present factor on the loss."""
        self.settle()
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
        self.settle()
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
        self.guard.require("engine")
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

    def _settled(self) -> None:
        self.drain()
        self.wait_parameters()

    def unit_names(self) -> list[str]:
        """The units that the model was divided into."""
        return [unit.name for unit in self.store.units]

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter, then every persistent buffer, by name and whole, each valid until the next is asked for.

        Every rank must go through all of them. Tied parameters come once, under their first name.
        """
        for unit in self.store.units:
            with self.gathered(unit.name):
                for flat in unit.flats():
                    for i, param in zip(flat.layout.params, flat.params, strict=True):
                        yield unit.layout.shape.params[i].name, param.detach()
        for prefix, module in self.module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer.detach()

    def module_state_dict(self) -> dict[str, torch.Tensor] | None:
        """The model's whole state dict in its own dtype, on the CPU of the first rank; None on the others.

        Every rank must call it. Tied parameters appear under each of their names, sharing memory.
        """
        keep = self.ranks.rank == 0
        state = {name: tensor.to("cpu", copy=True) for name, tensor in self.whole_tensors() if keep}
        if not keep:
            return None
        names = {id(param): name for name, param in self.module.named_parameters()}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            state.setdefault(name, state[names[id(param)]] if names[id(param)] in state else param.detach().cpu())
        return state

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: dict[str, Any] | None = None, save_latest: bool = True
    ) -> Path:
        """See :func:`zeroplan_runtime.checkpoint.save.save_checkpoint`."""
        from zeroplan_runtime.checkpoint.save import save_checkpoint

        self.guard.require("engine.save_checkpoint")
        return save_checkpoint(self, save_dir, tag, client_state, latest=save_latest)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, **options: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """See :func:`zeroplan_runtime.checkpoint.save.load_checkpoint`."""
        from zeroplan_runtime.checkpoint.save import load_checkpoint

        self.guard.require("engine.load_checkpoint", torn=True)
        self.zero_grad()
        found = load_checkpoint(self, load_dir, tag, **options)
        self.guard.loaded()
        return found

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> None:
        """See :func:`zeroplan_runtime.checkpoint.export.save_16bit_model`."""
        from zeroplan_runtime.checkpoint.export import save_16bit_model

        self.guard.require("engine.save_16bit_model")
        save_16bit_model(self, save_dir, save_filename)

    def _where(self) -> tuple[int, str, bool]:
        """For the watchdog: how far, where, and whether in the engine or with work on the device still to be done."""
        outside = "" if self._inside else ", outside the engine since"
        waiting = self._inside or not self._tail.done()
        return self.schedule.ticks, f"{self.schedule.where}, step {self.global_steps}{outside}", waiting

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._tail.record(self.schedule.compute)

    def progress(self) -> dict[str, Any]:
        """Step counts and loss scale, for a checkpoint."""
        return {
            "global_steps": self.global_steps,
            "micro_steps": self.micro_steps,
            "applied": self._applied,
            "skipped": self._skipped,
            "loss_scaler": self.scaler.state_dict(),
        }

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Goes on from :meth:`progress`. Whole accumulations only: counting begins at a boundary."""
        self.global_steps = progress["global_steps"]
        self.micro_steps = self.global_steps * self.config.grad_accum
        self._applied, self._skipped = progress["applied"], progress["skipped"]
        self.scaler.load_state_dict(progress["loss_scaler"])
