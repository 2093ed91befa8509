"""``DeepSpeedEngine``: the runtime's engine with the rest of DeepSpeed's names, and its refusals in DeepSpeed's classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from zeroplan.core.workload import DType
from zeroplan_runtime.checks import require_loss
from zeroplan_runtime.compat.deepspeed.config import DeepSpeedConfig
from zeroplan_runtime.compat.deepspeed.dataloader import DeepSpeedDataLoader
from zeroplan_runtime.compat.deepspeed.loss_backward import LossBackward
from zeroplan_runtime.compat.deepspeed.refusals import Refusal, refusing
from zeroplan_runtime.compat.deepspeed.zero import unmark
from zeroplan_runtime.engine import Engine
from zeroplan_runtime.optim.scaler import LossScaler


class LossScalerView:
    """The loss scale by the names of DeepSpeed's scalers; it shows what the last step has made of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def _scaler(self) -> LossScaler:
        self._engine.finish_step()
        return self._engine.scaler

    @property
    def cur_scale(self) -> float:
        """The factor on the loss of the next backward."""
        return self._scaler.scale

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        """Steps seen, skipped ones included."""
        return self._scaler.iteration

    @property
    def scale_window(self) -> int:
        """Steps without overflow after which the scale doubles."""
        return self._scaler.window

    @property
    def min_loss_scale(self) -> float:
        """The least scale."""
        return self._scaler.min_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale changes."""
        return self._scaler.dynamic

    dynamic = dynamic_loss_scale


class DeepSpeedEngine(Engine):
    """See :class:`zeroplan_runtime.engine.Engine`. What is not an attribute of the engine is one of the model.

    Attributes:
        _config: the ds_config, by DeepSpeed's names.
        training_dataloader: the loader of ``training_data``, or None.
    """

    _config: DeepSpeedConfig
    training_dataloader: DeepSpeedDataLoader | None
    collate_fn: Callable[..., Any] | None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise

    # ------------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`zeroplan_runtime.engine.Engine.forward`."""
        self._loss_backward.settle()
        with refusing():
            output = super().forward(*args, **kwargs)
        return self._loss_backward.watch(output) if torch.is_grad_enabled() else output

    @cached_property
    def _loss_backward(self) -> LossBackward:
        return LossBackward(self)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss, multiplied by the loss scale: with fp16 call ``engine.scale(loss).backward()``."""
        require_loss(loss)
        return self._loss_backward.scale(loss)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """See :meth:`zeroplan_runtime.engine.Engine.backward`."""
        self._loss_backward.settle()
        with refusing():
            if self.optimizer is None:
                raise Refusal("there is no optimizer", where="engine.backward", remedy="name one in the config or pass one")
            return super().backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """See :meth:`zeroplan_runtime.engine.Engine.step`.

        Without a backward it takes gradients that were set by hand, on one rank.

        Args:
            lr_kwargs: must be empty: the schedule's ``step`` is called without arguments.
        """
        self._loss_backward.settle()
        if lr_kwargs:
            raise Refusal("keywords for the schedule are not supported", where="engine.step", remedy="call its step() yourself")
        with refusing():
            if self.comm.world_size == 1 and self.optimizer is not None and not self.schedule.grads.has_grads:
                self._take_gradients()
            applied, steps = self.progress.applied, self.global_steps
            super().step()
            self.finish_step()
            self._step_applied = self.progress.applied > applied
        if self.global_steps > steps:
            if not self.managed_gradient_accumulation():
                parts = self.gradient_accumulation_steps()
                self._more_samples += (self._backwards - parts) * (self.train_batch_size() // parts)
            self._backwards = 0

    _step_applied = False
    _backwards = 0  # since the last step
    _more_samples = 0  # than the batch size's, where the user's own steps end accumulations

    @contextmanager
    def during_backward(self, *, boundary: bool, in_hook: bool = False) -> Iterator[None]:
        """See :meth:`zeroplan_runtime.engine.Engine.during_backward`."""
        self._backwards += 1
        with super().during_backward(boundary=boundary, in_hook=in_hook):
            yield

    def was_step_applied(self) -> bool:
        """Returns whether the last ``step()`` updated the parameters."""
        return self._step_applied

    def _take_gradients(self) -> None:
        """Takes the gradients that the user wrote to ``param.grad``, as those of a backward, and clears them."""
        given = [
            (unit, position, param)
            for unit in self.model_states.units
            if unit.trainable is not None
            for position, param in enumerate(unit.trainable.params)
            if param.grad is not None
        ]
        if not given:
            return
        self.finish_step()
        self.schedule.grads.boundary = self.is_gradient_accumulation_boundary()
        assert self.optimizer_step is not None
        self.optimizer_step.begin_backward(self.progress.applied + 1)
        self.schedule.root_pre_backward()
        with self.checks.during_backward(boundary=self.schedule.grads.boundary), torch.no_grad():
            for unit, position, param in given:
                assert param.grad is not None
                self.schedule.grads.accumulate(unit, position, param.grad)
                param.grad = None
            self.schedule.root_post_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :meth:`zeroplan_runtime.engine.Engine.no_sync`."""
        with refusing(), super().no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Enters a context whose backwards add up to the gradients of one step, taken after it; at stages 1 to 3.

        DeepSpeed reduces once, as it is left; here each backward reduces, and the sum is the same but for rounding.

        Raises:
            Refusal: at stage 0, within ``no_sync`` or another such context, and where the engine counts no micro batches.
        """
        where = "engine.coalesce_grad_reduction"
        if not self.zero_optimization():
            raise Refusal("requires ZeRO stage 1/2/3", where=where, remedy="use no_sync()")
        if not self.managed_gradient_accumulation():
            raise Refusal("managed_gradient_accumulation is false", where=where, remedy="call step() where the step ends")
        if self._in_no_sync:
            raise Refusal("cannot be nested inside another no_sync context", where=where)
        self._in_no_sync, boundary = True, self.progress.boundary  # which refuses a step
        self.progress.boundary = True
        try:
            yield
        finally:
            self._in_no_sync, self.progress.boundary = False, boundary

    def allreduce_gradients(self, *_: Any, **__: Any) -> None:
        """Does nothing: gradients are reduced in the backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        self._loss_backward.settle()
        with refusing():
            super().zero_grad(set_to_none)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """See :meth:`zeroplan_runtime.engine_getters.EngineGetters.set_gradient_accumulation_boundary`."""
        with refusing():
            super().set_gradient_accumulation_boundary(is_boundary)

    def empty_partition_cache(self) -> None:
        """Does nothing: between two steps only the units that the next forward needs first are unsharded."""

    def destroy(self, *, keep_parameters: bool = False) -> None:
        """See :meth:`zeroplan_runtime.engine.Engine.destroy`."""
        unmark(self)
        super().destroy(keep_parameters=keep_parameters)

    def compile(
        self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, schedule: Any = None, passes: Any = None
    ) -> None:
        """Compiles the model by ``torch.compile``.

        Raises:
            Refusal: for a `schedule` or `passes`, which are DeepCompile's.
        """
        if schedule is not None or passes is not None:
            raise Refusal("DeepCompile is not supported", where="engine.compile", remedy="leave schedule and passes out")
        with refusing():
            super().compile(backend=backend, **(compile_kwargs or {}))

    # ------------------------------------------------------------------ data

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader that gives each rank its own part of `dataset`, in micro batches.

        Args:
            dataset: with a length, or iterable.
            batch_size: samples in a batch; the micro batch by default.
            route: ``train`` shuffles; ``eval`` and ``predict`` do not.
            pin_memory: copy batches to pinned memory, on a GPU.
            data_sampler: chooses the samples.
            collate_fn: makes a batch of samples.
            num_local_io_workers: processes that load.
        """
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            ranks=self.comm.world_size,
            rank=self.comm.rank,
            shuffle=route == "train",
            pin_memory=pin_memory and self.device.type == "cuda",
            data_sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers or 0,
            drop_last=self.settings.drop_last,
        )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refuses: gradients' memory follows the accumulation steps that the config has.

        Raises:
            Refusal: for another number than the present one.
        """
        if train_batch_size != self.train_batch_size():
            raise Refusal("the batch size is fixed", where="set_train_batch_size", remedy="initialize anew with another config")

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Refuses: the config's batch sizes are fixed.

        Raises:
            Refusal: for another number than the present one.
        """
        if micro_batch_size != self.train_micro_batch_size_per_gpu():
            remedy = "initialize anew with another config"
            raise Refusal("the micro batch size is fixed", where="set_train_micro_batch_size", remedy=remedy)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Saves a checkpoint; see :func:`zeroplan_runtime.checkpoint.save.save_checkpoint`.

        Returns:
            Its folder; DeepSpeed returns true.
        """
        with refusing():
            named = None if tag is None else str(tag)
            return super().save_checkpoint(save_dir, named, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, load_module_strict: bool = True, **options: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Loads a checkpoint; see :func:`zeroplan_runtime.checkpoint.save.load_checkpoint`.

        Raises:
            Refusal: for a ``custom_load_fn``, and for a checkpoint of another model, with `load_module_strict` or without.
        """
        if options.pop("custom_load_fn", None) is not None:
            raise Refusal("a custom_load_fn is not supported", where="load_checkpoint", remedy="change the model after loading")
        named = None if tag is None else str(tag)
        with refusing():
            if self._config.load_universal_checkpoint:
                return self._load_universal(Path(load_dir), named, **options)
            return super().load_checkpoint(load_dir, named, **options)

    def _load_universal(
        self, folder: Path, tag: str | None, load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, **_: Any
    ) -> tuple[str | None, dict[str, Any]]:
        from zeroplan_runtime.checkpoint.universal import LATEST, load_universal_checkpoint  # slow to import

        if tag is None:
            if not (folder / LATEST).is_file():
                raise Refusal(f"there is no file {LATEST}", where=str(folder), remedy="give the tag")
            tag = (folder / LATEST).read_text().strip()
        found = load_universal_checkpoint(
            self, folder / tag, load_optimizer_states=load_optimizer_states, load_lr_scheduler_states=load_lr_scheduler_states
        )
        client = found.get("client_state")
        return str(folder / tag), client if client is not None else found

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Returns the unsharded state dict in the first rank's host memory, None on the others. Every rank must call it.

        A private method of DeepSpeed's that accelerate and transformers call.
        """
        state = self.module_state_dict()
        if state is None or not exclude_frozen_parameters:
            return state
        frozen = {name for name, param in self.module.named_parameters(remove_duplicate=False) if not param.requires_grad}
        return {name: tensor for name, tensor in state.items() if name not in frozen}

    # ------------------------------------------------------------------ getters

    @property
    def config(self) -> dict[str, Any]:
        """The ds_config as it was given."""
        return self._config._param_dict

    @property
    def global_samples(self) -> int:
        """Samples of all steps so far, over all ranks."""
        return self.global_steps * self.train_batch_size() + self._more_samples

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Layers whose gradients are sparse: none, as gradients lie in flat buffers."""
        return set()

    def gradient_clipping(self) -> float:
        """Returns the clipping norm; 0 for none."""
        return self._config.gradient_clipping

    def fp16_enabled(self) -> bool:
        """Returns whether the model is fp16."""
        return self.settings.dtype is DType.FP16

    def bfloat16_enabled(self) -> bool:
        """Returns whether the model is bf16."""
        return self.settings.dtype is DType.BF16

    def dynamic_loss_scale(self) -> bool:
        """Returns whether the loss scale changes."""
        return self.scaler.dynamic

    def managed_gradient_accumulation(self) -> bool:
        """Returns whether the engine counts micro batches."""
        return self.settings.counts_micro_batches

    def zero_optimization(self) -> bool:
        """Returns whether a ZeRO stage is used."""
        return self.settings.zero.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Returns whether gradients are sharded."""
        return self.settings.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Returns whether parameters are sharded."""
        return self.settings.zero.stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Returns true: :meth:`save_16bit_model` writes whole parameters at every stage."""
        return True

    def optimizer_name(self) -> str | None:
        """The config's optimizer, or the class of the one that was given."""
        return self._config.optimizer_name

    def steps_per_print(self) -> int | None:
        """Returns the config's ``steps_per_print``."""
        return self._config.steps_per_print

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, of a micro batch of one rank, and micro batches of a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_mom(self) -> list[Any]:
        """Returns the momentum, or the betas, of each parameter group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group["betas"] if "betas" in group else group.get("momentum") for group in groups]

    def get_type(self) -> list[str]:
        """Returns the kind of each parameter group."""
        return [group.get("type", "") for group in self.optimizer.param_groups] if self.optimizer is not None else []

    @property
    def local_rank(self) -> int:
        """This process's device number."""
        return self.device.index or 0

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.comm.world_size

    @property
    def data_parallel_group(self) -> Any:
        """The group of the ranks that share the model."""
        return self.comm.group if self.comm.group is not None else torch.distributed.group.WORLD
