"""The Engine that users train with; its methods have the names of DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroplan.core.buffers import Phase
from zeroplan.core.errors import BadInput
from zeroplan_runtime.activity import Activity
from zeroplan_runtime.arena import DTYPES, Arena
from zeroplan_runtime.checks import EngineChecks, refuse_copy, require_loss
from zeroplan_runtime.compiled import compile_units, outside_graphs
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.copies import allow_copies
from zeroplan_runtime.engine_getters import EngineGetters
from zeroplan_runtime.engine_states import make_states, zero_of
from zeroplan_runtime.first_batches import FirstBatches
from zeroplan_runtime.full_tensors import full_params, full_state_dict, full_tensors
from zeroplan_runtime.gradient_hooks import attach_gradient_hooks
from zeroplan_runtime.local_tensors import local_of
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.offload.host_setup import offload_optimizer
from zeroplan_runtime.optim.step import OptimizerStep, StepResult
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer
from zeroplan_runtime.parameter_writes import ParameterWrites
from zeroplan_runtime.progress import TrainingProgress
from zeroplan_runtime.pytree import cast_tensors
from zeroplan_runtime.replicas import Replicas
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.state_dict_hooks import StateDictHooks
from zeroplan_runtime.techniques.attached import Techniques
from zeroplan_runtime.units import Policy

if TYPE_CHECKING:
    from zeroplan_runtime.pipeline_kinds import TorchSchedule


class Engine(EngineGetters):
    """A model trained under ZeRO. Make one by :func:`zeroplan_runtime.initialize`.

    Call ``loss = engine(batch)``, ``engine.backward(loss)`` and ``engine.step()`` for each micro batch; the last ``step`` of
    an accumulation updates the model.

    Engine, model and optimizer refer to each other, so the garbage collector frees the memory some time after the last
    reference to them is gone; :meth:`destroy` frees it at once.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RuntimeConfig,
        optimizer: ZeroOptimizer | None,
        *,
        ranks: MeshRanks,
        device: torch.device,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.settings = config
        self.device = device
        self.ranks = ranks
        self.comm = ranks.shard
        self.optimizer = optimizer
        self.progress = progress = TrainingProgress(config.loss_scaler(), config.grad_accum)
        if not config.counts_micro_batches:
            progress.boundary = True
        self._in_no_sync = False
        self._pending_result: StepResult | None = None

        self.arena = Arena(device)
        self.model_states, self._frozen_here = make_states(model, config, optimizer, ranks, self.arena, policy)
        zero = zero_of(config, optimizer)
        self.replicas = Replicas(model, self.model_states)
        self.schedule = Schedule(self.model_states)
        self._undo = [attach_gradient_hooks(self.schedule, direct=config.runtime_options.direct_linear)]
        self.techniques = Techniques(model, config, self.schedule, ranks)
        self._undo.append(self.techniques.remove)
        self.checks = EngineChecks(model, self.model_states)
        self.state_dict_hooks = StateDictHooks(
            model, self.model_states, synchronize=self._synchronize_parameters, after_load=self.checks.recheck_parameters
        )
        self._undo.append(self.state_dict_hooks.remove)
        self._undo.append(allow_copies(model, self.model_states, self.schedule.handles + self.state_dict_hooks.handles))
        self.writes = self.schedule.writes = ParameterWrites(self.model_states, before=self._protect_snapshot)
        self.activity = Activity(self.schedule, device, lambda: progress.global_steps)
        self.schedule.reading = self.activity.alone
        self.activity.watch(ranks, config.runtime_options.timeout)
        self.optimizer_step = self.host = None
        if optimizer is not None:
            clip, may_skip = zero.step.gradient_clipping, config.check_overflow
            self.optimizer_step = OptimizerStep(self.schedule, optimizer, clip=clip, may_skip=may_skip)
            self.host = offload_optimizer(self.optimizer_step, zero, delayed_from=config.runtime_options.delayed_update)
            optimizer.attach(take_step=self.step, drop_grads=self.zero_grad)
        self.arena.empty_cache()
        self.arena.allocate_workspaces(DTYPES[config.dtype])
        self.model_states.reserve_gradients()
        self.checks.claim_parameters()
        self.schedule.guard.close_all()
        self.first_batches = FirstBatches(model, self.schedule, self.optimizer_step, config.runtime_options.audit_steps)

    # ------------------------------------------------------------------ training

    @outside_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward and unshards parameters as they are needed.

        Returns:
            What the model returns.

        Raises:
            BadInput: when the engine is destroyed, its last step failed, the model's parameters were replaced or moved, or
                another thread is in a forward.
        """
        self.checks.require_usable("engine")
        with self.checks.in_one_thread():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.schedule.resting:
            self.checks.require_parameters(self.module)
        if self.optimizer_step is not None and torch.is_grad_enabled():
            self.optimizer_step.frozen.look()
        self.schedule.require_no_early_updates("engine")
        self.techniques.choose_layers(self.progress.global_steps, in_forward=True)
        self.schedule.root_pre_forward()
        if self.settings.auto_cast:
            args, kwargs = cast_tensors((args, kwargs), DTYPES[self.settings.dtype])
        args, kwargs = self.techniques.cut(args, kwargs, self.progress.global_steps + 1)
        self.replicas.compare_inputs(args, kwargs)
        self.checks.saw_inputs(args, kwargs)
        if self.monitor is not None and torch.is_grad_enabled():
            self.monitor.saw_inputs(args, kwargs)
        with self._computing(backward=False), self.techniques.saving():
            output = self.module(*args, **kwargs)
        self.schedule.guard.close_all()
        return output

    @outside_graphs
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Computes the gradients of `loss` / accumulation steps (as DeepSpeed does), averaged over the ranks.

        The gradients of several calls before one step add up.

        Args:
            loss: one element, a result of this engine's forward.
            retain_graph: keep the graph, so that another call can go through it.
            scale_wrt_gas: divide the loss by the accumulation steps.

        Returns:
            The loss, divided by the accumulation steps if `scale_wrt_gas`.

        Raises:
            BadInput: when `loss` is not one element with a gradient, or of no samples and no number, after a backward that
                failed, and for a second call in a step where updates on the host start in the backward.
        """
        self.checks.require_usable("engine.backward")
        require_loss(loss)
        self.checks.require_number(loss)
        parts = self.settings.grad_accum if scale_wrt_gas and self.settings.counts_micro_batches else 1
        scaled = loss / parts if parts > 1 else loss
        with self.during_backward(boundary=self.is_gradient_accumulation_boundary()):
            whole = scaled * self.scaler.scale if self.scaler.scale != 1.0 else scaled
            whole.backward(retain_graph=retain_graph)
        if self.monitor is not None:
            self.monitor.saw_loss(local_of(scaled))
        return scaled

    @contextmanager
    def during_backward(self, *, boundary: bool, in_hook: bool = False) -> Iterator[None]:
        """Enters the context of one micro batch's backward, whoever runs it; the loss scale is this step's within it.

        Args:
            boundary: the optimizer steps after it.
            in_hook: a hook of autograd's enters it, and modes of torch's that it enters would not outlive it.

        Raises:
            BadInput: as :meth:`backward`.
        """
        self.checks.require_usable("engine.backward")
        self.checks.require_backward(once=self.host is not None and self.host.early_request is not None)
        self.writes.keep()  # updates on the host may begin in this backward
        self.finish_step()
        self.schedule.grads.boundary = boundary
        if self.optimizer_step is not None:
            self.optimizer_step.begin_backward(self.progress.applied + 1)
        self.arena.phase = Phase.BACKWARD
        self.techniques.choose_layers(self.progress.global_steps)
        self.schedule.root_pre_backward()
        with self.checks.during_backward(boundary=boundary), self._computing(backward=True, modes=not in_hook):
            yield
            self.schedule.root_post_backward()

    def pipeline_schedule(
        self,
        kind: type[TorchSchedule] | str,
        loss_fn: Callable[..., torch.Tensor],
        **options: Any,
    ) -> TorchSchedule:
        """See :func:`zeroplan_runtime.pipeline.make_schedule`."""
        from zeroplan_runtime.pipeline import make_schedule

        return make_schedule(self, kind, loss_fn, **options)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model in place, as ``model.compile(...)`` does, by ``torch.compile`` and with its arguments.

        Each block is a graph of its own, and what lies between them is compiled where hooks on the units part it.

        Raises:
            BadInput: for a mode with CUDA graphs, where steps leave blocks out, and where ranks have parts of parameters.
        """
        self.techniques.require_compilable()
        compile_units(self.module, self.model_states.blocks, hooked=self.schedule.hooked, args=args, kwargs=kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enters a context in which backwards add up gradients without a step; the first backward after it completes their
        mean.

        At stage 0, and at stage 1 with several accumulation steps, nothing is reduced within it. Micro batches in it are not
        counted.

        Raises:
            BadInput: at stages 2 and 3, which reduce in every backward, and within another such context.
        """
        if self.settings.zero.stage >= 2:
            raise BadInput(
                "no_sync context manager is incompatible with stages 2 and 3, which shard gradients in every backward",
                where="engine.no_sync",
                remedy="use stage 0 or 1",
            )
        if self._in_no_sync:
            raise BadInput("no_sync context manager reentry is unsupported", where="engine.no_sync")
        self._in_no_sync, boundary = True, self.progress.boundary
        self.progress.boundary = False
        try:
            yield
        finally:
            self._in_no_sync, self.progress.boundary = False, boundary

    @contextmanager
    def _computing(self, *, backward: bool, modes: bool = True) -> Iterator[None]:
        """Enters the context of a forward or backward, in which the watchdog and, by `modes`, audits and profiler look on."""
        naming = self.ranks.world.naming_ranks_that_computing_lost()
        audited = self.first_batches.audited(self.progress.micro_steps) if modes else nullcontext()
        profiler = self.flops_profiler if modes and torch.is_grad_enabled() else None
        counted = nullcontext() if profiler is None else profiler.counting(self.progress.global_steps, backward=backward)
        with self.activity.inside(), naming, audited, counted:
            yield

    @outside_graphs
    def step(self) -> None:
        """Ends a micro batch; the last one of an accumulation updates the parameters and the learning rate."""
        self.checks.require_usable("engine.step")
        self.checks.require_synchronized(self._in_no_sync)
        boundary = self.is_gradient_accumulation_boundary()
        if boundary and self.optimizer_step is None:
            trains = any(param.requires_grad for param in self.module.parameters())
            remedy = "name one in the config or pass one" if trains else "the model has no parameter to train"
            raise BadInput("there is no optimizer", where="engine.step", remedy=remedy)
        if boundary:
            self.checks.require_gradients()
        self.first_batches.look_for_aliases(on_host=self.host is not None)
        self.progress.micro_steps += 1
        if not boundary or self.optimizer_step is None:
            return
        self.writes.keep()
        self.finish_step()
        self.arena.phase = Phase.STEP
        self.activity.begin("the optimizer's step")
        self.replicas.compare_gradients(self.schedule.grads)
        hooked = self.optimizer is not None and self.optimizer.has_step_hooks
        if self.optimizer is not None and hooked:
            self.optimizer.run_step_hooks(before=True)
        self.optimizer_step.read_hyperparameters()
        self._protect_snapshot()
        with self.checks.during_step(), self.activity.inside():
            result = self.optimizer_step.step(self.progress.applied + 1, self.scaler.scale)
            self.writes.stepped()
            self.schedule.grads.has_grads = False
            self.techniques.choose_layers(self.progress.global_steps + 1)
            if self.model_states.quantiser is not None:
                self.model_states.quantiser.step = self.progress.global_steps + 1
            self.schedule.prefetch_forward()
        if self.schedule.has_aliases and self.host is not None:
            self.host.early_request = None  # an update in the backward would change what an alias shows before the step
        self.progress.global_steps += 1
        self.last_step = self._pending_result = result
        if self.monitor is not None:
            rates = [float(group["lr"]) for group in self.optimizer_step.optimizer.param_groups]
            self.monitor.stepped(self.progress.global_steps * self.train_batch_size(), rates, self.scaler.scale)
        if self.flops_profiler is not None:
            self.flops_profiler.stepped(self.progress.global_steps)
        if not self.settings.check_overflow or self.device.type == "cpu":
            self.finish_step()
        if self.optimizer is not None and hooked:
            self.finish_step()
            if not (self.settings.check_overflow and result.skipped):
                self.optimizer.run_step_hooks(before=False)

    def finish_step(self) -> None:
        """Updates loss scale, step count and learning rate from the last step's result. Does nothing if that was done.

        This waits for the device, so it is called in the next backward, while the device still runs the forward.

        Raises:
            BadInput: when the ranks' collectives were of different units, or gradients overflow at the least loss scale.
        """
        result, self._pending_result = self._pending_result, None
        if result is None:
            return
        if self.comm.world_size > 1 and result.is_mixed:
            self.checks.refuse_mixed_collectives()
        if self.settings.check_overflow and result.skipped:
            self.progress.step_was_skipped(self.ranks.world.rank, self.unit_names, self.model_states.squares)
            return
        self.progress.step_was_applied()
        if self.optimizer_step is not None:
            self.optimizer_step.frozen.was_applied()
        if self.optimizer is not None:
            self.optimizer.was_stepped(self.progress.applied)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _protect_snapshot(self) -> None:
        """Lets nothing change what a save in the background has not copied yet."""
        if self.model_states.pending_save is not None:
            self.model_states.pending_save.protect(self.schedule.compute_stream)

    def drain(self) -> None:
        """Blocks until every update, on the host or the device, has been applied to the masters and its parameters are sent.

        Raises:
            BadInput: as :meth:`finish_step`, and when the engine is destroyed.
            RuntimeError: when an update on the host failed.
        """
        self.checks.require_usable("engine", allow_failed_step=True)
        self.writes.keep()
        self.finish_step()
        if self.host is not None:
            self.host.drain(self.schedule.compute_stream)
            self.schedule.parameters_were_sent()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients accumulated so far.

        Raises:
            BadInput: when the engine is destroyed, or updates that use the gradients have begun on the host.
        """
        self.checks.require_usable("engine.zero_grad", allow_failed_step=True)
        if self.schedule.grads.has_grads:
            self.schedule.grads.drop()
            self.checks.grads_were_dropped()

    # ------------------------------------------------------------------ parameters

    def wait_parameters(self) -> None:
        """Makes the current stream wait for every all-gather that the last step has issued.

        Call it before reading parameters directly at stages 0 to 2; forwards wait by themselves.
        """
        self.schedule.wait_for_unshard()

    @contextmanager
    def gathered(self, name: str = "root") -> Iterator[None]:
        """A context in which one unit's parameters are unsharded. Every rank must enter it.

        What is written to them stays, if every rank writes the same. At stage 3 no gradients can be taken of what is computed
        from them, as their backward would come after the context.

        Args:
            name: one of :meth:`unit_names`.

        Raises:
            BadInput: for an unknown name, and when the engine cannot be used.
        """
        self.checks.require_usable("engine")
        unit = next((u for u in self.model_states.units if u.name == name), None)
        if unit is None:
            raise BadInput(f"there is no unit {name!r}", where="gathered", remedy="see engine.unit_names()")
        with self.schedule.unsharded(unit):
            yield
            self.writes.keep()

    def full_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields every parameter, then every other entry of the state dict, by the model's present names and unsharded.

        A tensor is valid until the next is asked for. Every rank must iterate to the end. Tied parameters come once, under
        their first name.
        """
        self.checks.require_usable("engine")
        yield from full_tensors(self.module, self.schedule)

    def module_state_dict(self) -> dict[str, Any] | None:
        """Returns the unsharded model's ``state_dict()``, in its dtype, in the first rank's host memory; None on other ranks.

        Every rank must call it. Tied parameters appear under each of their names and share memory.
        """
        self.checks.require_usable("engine")
        return full_state_dict(self.module, self.schedule)

    # ------------------------------------------------------------------ files; what they do is slow to import

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """See :func:`zeroplan_runtime.checkpoint.save.save_checkpoint`."""
        from zeroplan_runtime.checkpoint.save import save_checkpoint

        return save_checkpoint(
            self, save_dir, tag, client_state, latest=save_latest, exclude_frozen_parameters=exclude_frozen_parameters
        )

    def wait_for_checkpoint(self) -> None:
        """Blocks until the checkpoint that ``async_checkpoints`` lets threads write is complete. Every rank must call it.

        Raises:
            BadInput: on every rank, when one could not write; what was saved before stays.
        """
        pending, self.model_states.pending_save = self.model_states.pending_save, None
        if pending is not None:
            with self.activity.inside("waiting for a checkpoint"):
                pending.wait(self)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, **options: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """See :func:`zeroplan_runtime.checkpoint.load.load_checkpoint`."""
        from zeroplan_runtime.checkpoint.load import load_checkpoint

        return load_checkpoint(self, load_dir, tag, **options)

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> None:
        """See :func:`zeroplan_runtime.checkpoint.export.save_16bit_model`."""
        from zeroplan_runtime.checkpoint.export import save_16bit_model

        save_16bit_model(self, save_dir, save_filename)

    # ------------------------------------------------------------------ end

    def destroy(self, *, keep_parameters: bool = False) -> None:
        """Frees all memory of the runtime. A second call does nothing.

        Args:
            keep_parameters: leave the unsharded parameters in host memory, in the model's dtype, so that the model can be
                used or given to :func:`zeroplan_runtime.initialize` again. Every rank must then call this with the same
                value. Otherwise the model's parameters are empty afterwards.
        """
        if self.checks.is_destroyed:
            return
        self.wait_for_checkpoint()
        kept: dict[int, torch.Tensor] = {}
        if keep_parameters:
            self.checks.require_usable("engine.destroy")
            self.drain()
            kept = {id(param): values.to("cpu", copy=True) for _, param, values in full_params(self.schedule)}
        self.checks.give_up_parameters(emptied=not keep_parameters)
        with suppress(BadInput):  # an overflow at the least loss scale does not matter any more
            self.finish_step()
        if self.host is not None:
            self.host.close()
        if self.monitor is not None:
            self.monitor.close()
        self.activity.end_watch(self.ranks)
        for undo in reversed(self._undo):
            undo()
        self.schedule.remove()
        self.schedule.guard.remove()
        self.schedule.grads.drop(anyway=True)
        for param in self._frozen_here:
            param.requires_grad_(True)
        self.writes.free()
        if self.optimizer is not None:
            self.optimizer.release_states()
        if self.optimizer_step is not None:
            self.optimizer_step.slices.clear()
        self.optimizer_step = self.host = self.schedule.grads.host = self.last_step = None
        self.first_batches.close()
        self.model_states.free(kept)
        self.arena.release_host()

    def _synchronize_parameters(self) -> None:
        self.drain()
        self.wait_parameters()

    __reduce_ex__ = refuse_copy
