"""The strategy: an engine around the LightningModule for the length of ``fit``, ``validate``, ``test`` or ``predict``.

Launching, process groups and reductions are those of Lightning's ``DDPStrategy``. What is the runtime's: the module is sharded
in ``setup`` and whole again, in host memory, after ``teardown``; backward, clipping, loss scaling and step are the engine's;
checkpoints are folders of :mod:`zeroplan_runtime.integrations.lightning.checkpoints`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.api import initialize
from zeroplan_runtime.arena import DTYPES
from zeroplan_runtime.engine import Engine
from zeroplan_runtime.integrations.lightning import checkpoints
from zeroplan_runtime.integrations.lightning.ds_config import engine_config, require_one_optimizer
from zeroplan_runtime.integrations.lightning.precision import precision_class

_MADE: dict[str, type[Any]] = {}


def strategy_class(namespace: str) -> type[Any]:
    """Returns the strategy's class as a subclass of `namespace`'s ``DDPStrategy``."""
    if namespace not in _MADE:
        base = import_module(f"{namespace}.strategies").DDPStrategy
        options = {"__module__": __name__, "__doc__": _EngineStrategy.__doc__, "namespace": namespace}
        _MADE[namespace] = type("ZeroplanStrategy", (_EngineStrategy, base), options)
    return _MADE[namespace]


class _EngineStrategy:
    """Trains a LightningModule under :class:`zeroplan_runtime.Engine`.

    Args:
        stage: the ZeRO stage, 0 to 3.
        offload_optimizer: keep the masters and the optimizer's states in host memory and update them there.
        offload_parameters: keep the parameters in host memory; stage 3 only.
        config: a ds_config, or the path of its JSON, in place of the three. It need not have batch sizes, accumulation,
            clipping or precision, which are the Trainer's; it may name the optimizer and the schedule.
        options: ``DDPStrategy``'s, such as ``process_group_backend``, ``timeout`` and ``start_method``.
    """

    namespace = "lightning.pytorch"
    strategy_name = "zeroplan"

    # Lightning's own attributes, which the base class sets.
    model: Any
    lightning_module: Any
    accelerator: Any
    optimizers: list[Any]
    lr_scheduler_configs: list[Any]
    root_device: torch.device
    world_size: int
    is_global_zero: bool
    checkpoint_io: Any
    _layer_sync: Any

    def __init__(
        self,
        stage: int = 2,
        *,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: Mapping[str, Any] | str | Path | None = None,
        **options: Any,
    ) -> None:
        self._engine: Engine | None = None
        self._after_fit: checkpoints.AfterFit | None = None
        self._failed = False
        zero: dict[str, Any] = {"stage": stage}
        zero |= {"offload_optimizer": {"device": "cpu"}} if offload_optimizer else {}
        zero |= {"offload_param": {"device": "cpu"}} if offload_parameters else {}
        self._config = config if config is not None else {"zero_optimization": zero}
        base: Any = super()
        base.__init__(**options)

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            BadInput: outside ``fit``, ``validate``, ``test`` and ``predict``.
        """
        if self._engine is None:
            raise BadInput("there is no engine outside trainer.fit()", where="ZeroplanStrategy")
        return self._engine

    # ------------------------------------------------------------------ set up and tear down

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin; one of Lightning's that is given becomes the runtime's of the same precision."""
        return self._precision_plugin if self._precision_plugin is not None else precision_class(self.namespace)()

    @precision_plugin.setter
    def precision_plugin(self, given: Any) -> None:
        kind = precision_class(self.namespace)
        self._precision_plugin = given if given is None or isinstance(given, kind) else kind(given.precision)

    def setup(self, trainer: Any) -> None:
        """Makes the engine around the module, with the optimizer and schedule of ``configure_optimizers`` when fitting."""
        base: Any = super()
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == "fit"
        self._failed, self._after_fit = False, None
        module = self.lightning_module
        if fits and self._layer_sync:
            self._layer_sync.apply(module)
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # what is gathered within it could not be used in a backward later
        config = engine_config(self._config, self.precision_plugin.precision, trainer, fits=fits, namespace=self.namespace)
        optimizer = None
        if fits:
            base.setup_optimizers(trainer)
            optimizer = require_one_optimizer(self.optimizers, config)
        _move_states(module, self.root_device)
        self._engine, sharded, _, schedule = initialize(
            model=module, config=config, optimizer=optimizer, device=self.root_device
        )
        if fits:
            self._connect_optimizer(sharded, schedule)
        self.model = self._engine
        self.precision_plugin.attach(self._engine, DTYPES[self._engine.settings.dtype])
        base.setup_precision_plugin()
        base.barrier()

    def _connect_optimizer(self, optimizer: Any, schedule: Any) -> None:
        """Shows Lightning the engine's optimizer, and lets Lightning step a schedule of the config."""
        self.optimizers = [optimizer]
        if schedule is not None:
            kind = import_module(f"{self.namespace}.utilities.types").LRSchedulerConfig
            self.lr_scheduler_configs = [kind(schedule, interval="step")]
            self.engine.lr_scheduler = None
        for one in self.lr_scheduler_configs:  # else torch would warn: the engine tells a step only when the next begins
            if hasattr(one.scheduler, "optimizer"):
                one.scheduler.optimizer._opt_called = True

    def on_exception(self, exception: BaseException) -> None:
        """Notes that other ranks may have gone elsewhere."""
        self._failed = True
        base: Any = super()
        base.on_exception(exception)

    def teardown(self) -> None:
        """Destroys the engine. The module then holds its parameters whole, unless several ranks ended by an exception.

        After fit the shards of masters and optimizer states stay in host memory until the next call of the Trainer, as
        Lightning's own strategies keep theirs, so that ``trainer.save_checkpoint()`` has them.
        """
        base: Any = super()
        engine, self._engine = self._engine, None
        if engine is not None:
            self.precision_plugin.attach(None, torch.float32)
            self.model = self.lightning_module
            try:
                if not self._failed and engine.optimizer is not None:
                    self._after_fit = checkpoints.AfterFit(engine)
                engine.destroy(keep_parameters=not self._failed or engine.world_size == 1)
                if self._after_fit is not None:
                    self._after_fit.is_whole()
            except BadInput:
                if not self._failed:
                    raise
                engine.destroy()  # a step failed half-way: what is raised already says why
        base.teardown()

    # ------------------------------------------------------------------ training

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing: :meth:`backward` says which micro batch completes the gradients."""
        return nullcontext()

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes gradients; the last micro batch of an accumulation, as Lightning counts, completes them."""
        module, engine, base = self.lightning_module, self.engine, super()
        lightnings: Any = base
        if not module.automatic_optimization:  # the user's own steps end accumulations
            engine.set_gradient_accumulation_boundary(True)
            return lightnings.backward(closure_loss, optimizer, *args, **kwargs)
        ends = not module.trainer.fit_loop._should_accumulate()
        engine.set_gradient_accumulation_boundary(ends)
        loss = lightnings.backward(closure_loss, optimizer, *args, **kwargs)
        if not ends:
            engine.step()  # counts the micro batch
        return loss

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: an engine loads them."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engine's checkpoint holds the optimizer's states."""
        return False

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns nothing: the engine's checkpoint holds the optimizer's states."""
        return {}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns nothing under an engine, which saves the parameters itself; else the module's state dict."""
        module: nn.Module = self.lightning_module
        return module.state_dict() if self._engine is None else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Saves a folder to resume from, or, where Lightning asks for the weights only, a file as Lightning's own are.

        Raises:
            BadInput: for `storage_options`, after fit for more than the weights, else as
                :meth:`zeroplan_runtime.Engine.save_checkpoint`.
        """
        if storage_options is not None:
            raise BadInput("storage_options are not supported", where="trainer.save_checkpoint", remedy="leave them out")
        base: Any = super()
        path = Path(base.broadcast(filepath))
        if self._engine is None:  # after fit; the module holds its parameters whole
            if "optimizer_states" in checkpoint:
                if self._after_fit is None:
                    raise checkpoints.went("there are no states of an optimizer after what ended last")
                self._after_fit.save(path, checkpoint)
                return
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path)
            base.barrier()
            return
        if "optimizer_states" in checkpoint:
            checkpoints.save_folder(self.engine, path, checkpoint)
            return
        state = self.engine.module_state_dict()
        if state is not None:
            self.checkpoint_io.save_checkpoint({**checkpoint, "state_dict": state}, path)
        base.barrier()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a folder that this strategy saved, or any file of Lightning's.

        Raises:
            BadInput: for another folder, and for a file with states of an optimizer where the training is to go on.
        """
        base: Any = super()
        fits = self.lightning_module.trainer.state.fn == "fit"
        path = Path(checkpoint_path)
        if path.is_dir():
            return checkpoints.load_folder(self.engine, path, trains=fits, weights_only=weights_only)
        loaded: dict[str, Any] = base.load_checkpoint(checkpoint_path, weights_only)
        if fits and any(loaded.get("optimizer_states", ())):
            raise BadInput(
                "holds an optimizer's states in one file, which cannot be loaded into shards",
                where=str(path),
                remedy="load its state_dict into the module before trainer.fit(), without ckpt_path",
            )
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the parameters and buffers of a file; those of a folder are loaded already."""
        if "state_dict" in checkpoint:
            checkpoints.load_state_dict(self.engine, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: the engine has loaded them."""


def _move_states(module: nn.Module, device: torch.device) -> None:
    """Moves what is neither parameter nor buffer, as metrics have it, and sets the device that Lightning's modules show."""
    for part in module.modules():
        if next(part.parameters(), None) is None:
            part.to(device)
        elif isinstance(getattr(part, "_device", None), torch.device):
            showing: Any = part
            showing._device = device
