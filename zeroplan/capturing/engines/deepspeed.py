"""DeepSpeed: ``deepspeed.initialize`` and what scripts call beside it.

Source: DeepSpeed 0.19.8, ``__init__.py`` (``initialize``), ``runtime/engine.py``, ``runtime/zero/partition_parameters.py``.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from zeroplan.capturing.engines.handed import Handed, optimizer_facts
from zeroplan.capturing.hooks.imports import changes
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import is_users, user_line
from zeroplan.capturing.spans import SAVE, STEP

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

#: The folder of capture's own files.
_OURS = __file__.rpartition("/")[0].rpartition("/")[0]
#: Sections by which several ranks share a model's matrices or tokens, or another engine runs.
_OTHER_WAYS = {
    "tensor_parallel": ("autotp_size", "AutoTP"),
    "expert_parallel": ("enabled", "AutoEP"),
    "hybrid_engine": ("enabled", "the hybrid engine"),
    "compile": ("deepcompile", "DeepCompile"),
}


def install(capture: Capture, module: Any) -> None:
    """Put the stand-ins in place of DeepSpeed's own."""
    _install_optimizers(module)
    _install_contexts(capture, module)
    kind = _engine_class(capture, module)

    def initialize(
        args: Any = None, model: Any = None, optimizer: Any = None, model_parameters: Any = None, training_data: Any = None,
        lr_scheduler: Any = None, distributed_port: int = 29500, mpu: Any = None, dist_init_required: Any = None,
        collate_fn: Any = None, config: Any = None, mesh_param: Any = None, config_params: Any = None,
    ) -> Any:  # fmt: skip
        from deepspeed.runtime.pipe.module import PipelineModule

        if isinstance(model, PipelineModule):
            raise StoppedError("DeepSpeed's PipelineModule is not captured: plan it by zeroplan estimate --pp", user_line())
        if mpu is not None or mesh_param is not None:
            raise StoppedError("deepspeed.initialize with groups of its own (mpu, mesh_param) is not captured", user_line())
        config = config if config is not None else config_params
        config = getattr(args, "deepspeed_config", None) if config is None else config
        module.comm.init_distributed(dist_backend="nccl", dist_init_required=dist_init_required)
        engine = kind(model, optimizer, model_parameters, lr_scheduler, config, collate_fn)
        loader = engine.deepspeed_io(training_data) if training_data is not None else None
        engine.training_dataloader = loader
        return engine, engine.optimizer, loader, engine.lr_scheduler

    module.initialize = initialize


def _install_optimizers(module: Any) -> None:
    """Let DeepSpeed's optimizers be made without their compiled operators."""
    for home in (module.ops.adam, module.ops.lion, module.ops.lamb, module.ops.adagrad):
        changes(home)
        for name, kind in list(vars(home).items()):
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                setattr(home, name, _stand_in(name))


def _stand_in(name: str) -> Any:
    """An optimizer of that name that holds groups and steps nothing."""

    def init(self: Any, model_params: Any, lr: float = 1e-3, **defaults: Any) -> None:
        torch.optim.Optimizer.__init__(self, model_params, {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 0.0, **defaults})

    def step(self: Any, closure: Any = None) -> None:
        return None

    return type(name, (torch.optim.Optimizer,), {"__init__": init, "step": step})


def _install_contexts(capture: Capture, module: Any) -> None:
    """``zero.Init`` and ``zero.GatheredParameters``: parameters are whole wherever a script looks at them."""
    zero = module.zero

    def read() -> None:
        """Note a line of the script's own that reads the shape of a parameter, which is empty there."""
        frame: Any = sys._getframe(1)
        while frame is not None and not is_users(frame.f_code.co_filename):
            if frame.f_code.co_filename.startswith(_OURS) or "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
                continue
            return
        if frame is not None and capture.handed is None:
            at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            capture.leave_out("zero.Init", "unknown", f"{at} reads the shape of a sharded parameter, which is empty on a GPU")

    class ShardedInit:
        """Notes that a model is made sharded."""

        def __init__(self, *_: Any, **__: Any) -> None:
            capture.engine_notes["zero_init"] = True
            capture.functions.on_parameter_shape = read

        def __enter__(self) -> None:
            return None

        def __exit__(self, *_: object) -> None:
            return None

    @contextlib.contextmanager
    def gathered(*_: Any, **__: Any) -> Iterator[None]:
        before, capture.functions.on_parameter_shape = capture.functions.on_parameter_shape, None
        try:
            yield
        finally:
            capture.functions.on_parameter_shape = before

    for home in (zero, zero.partition_parameters):
        changes(home)
        home.Init, home.GatheredParameters = ShardedInit, gathered


def _engine_class(capture: Capture, module: Any) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.torch_autocast import autocast_if_enabled

    base: Any = DeepSpeedEngine

    class CapturedEngine(base):  # type: ignore[misc]
        """DeepSpeed's engine as scripts see it, over a whole model."""

        def __init__(self, model: Any, optimizer: Any, parameters: Any, scheduler: Any, config: Any, collate_fn: Any) -> None:
            torch.nn.Module.__init__(self)
            self.__dict__["module"] = model
            self._modules["module"] = model
            self._config = DeepSpeedConfig(config, None)
            self.config, self.collate_fn = self._config._param_dict, collate_fn
            _require_plain(self.config)
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.local_rank, self.global_rank = capture.job.world.local_rank, capture.job.world.rank
            self.world_size = self.dp_world_size = capture.job.world.size
            self.client_optimizer, self.client_lr_scheduler = optimizer, scheduler
            self.lr_scheduler: Any = None
            self.basic_optimizer = self.optimizer = self.training_dataloader = None
            self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
            self._is_gradient_accumulation_boundary = None
            self._running_engine_step = self._is_compiled = self.inside_no_sync_ctxt = False
            self._step_applied, self._global_grad_norm, self.has_moe_layers, self.zenflow = True, None, False, False
            self.mpu = self.all_to_all_group = self.monitor = self.tput_timer = None
            said = {"ds_config": as_json(self.config), "zero_init": bool(capture.engine_notes.get("zero_init"))}
            stage = self.zero_optimization_stage()
            self.handed: Any = None
            if optimizer is not None or self.optimizer_name():
                self.handed = Handed(capture, "deepspeed", model, said, zero3=stage == 3, both=True, keeps_grads=False)
            elif stage == 3:
                capture.leave_out("reference", "less", "a model without an optimizer, which is sharded, is counted whole")
            self._placed()
            if stage == 3:
                _as_available(model)
            if self.handed is not None:
                self._optimized(optimizer, parameters)
                self.handed.ready()

        def _placed(self) -> None:
            """Cast and move the model as ``_configure_distributed_model`` does."""
            param_dtype, buffer_dtype = self._mixed_precision_dtypes()
            self._cast_module_mixed_precision(param_dtype, buffer_dtype, False)
            self.module.to(self.device)

        def _optimized(self, optimizer: Any, parameters: Any) -> None:
            optimizer = _made(self, optimizer, parameters)
            self.optimizer = self.basic_optimizer = optimizer
            if optimizer is not None:
                self.handed.optimizer = optimizer
                self._configure_lr_scheduler()

        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            """The model's own forward."""
            with autocast_if_enabled(self):
                return self.module(*inputs, **kwargs)

        def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: Any) -> Any:
            """The loss's own backward."""
            loss = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
            (loss.float() if self.fp16_enabled() else loss).backward(retain_graph=retain_graph)
            return loss

        def step(self, lr_kwargs: Any = None) -> None:
            """Count the micro batch, and at a boundary the step."""
            if self.is_gradient_accumulation_boundary():
                capture.spans.enter(STEP)
                self.global_steps += 1
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step(**(lr_kwargs or {}))
                capture.spans.stepped(self.optimizer if self.optimizer is not None else self)
            self.micro_steps += 1
            self.global_samples += self.train_micro_batch_size_per_gpu() * self.dp_world_size

        def zero_grad(self, *_: Any, **__: Any) -> None:
            """Gradients are the engine's own."""

        def train(self, mode: bool = True) -> Any:
            """Set the model's mode."""
            self.training = mode
            self.module.train(mode)
            return self

        def eval(self) -> Any:
            """Set the model's mode."""
            return self.train(False)

        def destroy(self) -> None:
            """Nothing is held."""

        def get_lr(self) -> list[Any]:
            """The groups' rates."""
            return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

        def get_global_grad_norm(self) -> float:
            """An invented norm."""
            return 1.0

        def save_checkpoint(self, *_: Any, **__: Any) -> bool:
            """Note that it saves."""
            capture.spans.enter(SAVE)
            capture.engine_notes["saves"] = "full"
            return True

        def load_checkpoint(self, *_: Any, **__: Any) -> tuple[None, dict[str, Any]]:
            """Find none."""
            return None, {}

        def save_16bit_model(self, *_: Any, **__: Any) -> bool:
            """Note that it saves."""
            return self.save_checkpoint()

        def _whole(self, *_: Any, **__: Any) -> Any:
            capture.spans.enter(SAVE)
            return {name: value.detach().cpu() for name, value in self.module.state_dict().items()}

        _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict = module_state_dict = _whole

    CapturedEngine.__name__ = CapturedEngine.__qualname__ = "DeepSpeedEngine"
    return CapturedEngine


def _made(engine: Any, optimizer: Any, parameters: Any) -> Any:
    """The optimizer that the script gives, or that its ds_config names; None for neither."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
        optimizer = optimizer(list(parameters or engine.module.parameters()))
    if optimizer is not None:
        engine.handed.options |= optimizer_facts(optimizer)
    elif engine.optimizer_name():
        held = [p for p in engine.module.parameters() if p.requires_grad] if parameters is None else list(parameters)
        optimizer = _stand_in(engine.optimizer_name())(held, lr=dict(engine.optimizer_params() or {}).get("lr", 1e-3))
    return optimizer


def _as_available(model: Any) -> None:
    """Let parameters say that they are gathered, of which scripts ask them at stage 3."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for number, param in enumerate(model.parameters()):
        param.ds_status, param.ds_id, param.ds_shape = ZeroParamStatus.AVAILABLE, number, param.shape
        param.ds_numel = param.numel()


def as_json(value: Any) -> Any:
    """A ds_config without what JSON has not: accelerate says infinity for ``steps_per_print``."""
    if isinstance(value, dict):
        return {str(key): as_json(one) for key, one in value.items() if not isinstance(one, float) or math.isfinite(one)}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _require_plain(config: dict[str, Any]) -> None:
    """Stop at what takes a model apart in another way than ZeRO.

    Raises:
        StoppedError: naming the section.
    """
    for section, (key, name) in _OTHER_WAYS.items():
        held = config.get(section)
        value = held.get(key) if isinstance(held, dict) else None
        if (value and value != 1) or value is True:
            raise StoppedError(f"{name} ({section}.{key}) under capture is not understood", user_line())
    if int(config.get("sequence_parallel_size") or 1) > 1:
        raise StoppedError("sequence_parallel_size above 1 under capture is not understood", user_line())
