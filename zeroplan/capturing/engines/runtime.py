"""The included runtime: ``zeroplan_runtime.initialize``, its Lightning strategy and its names of DeepSpeed's.

All of them make their engine by ``zeroplan_runtime.api.make_engine``, which here makes one that holds the whole model: config,
optimizer, schedule and loader are the runtime's own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from zeroplan.capturing.engines.deepspeed import as_json
from zeroplan.capturing.engines.handed import Handed, optimizer_facts
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line
from zeroplan.capturing.spans import SAVE, STEP

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

#: Settings that change what a step runs, by the key of each.
_TECHNIQUES = {
    "sparse_attention": "sparse_attention", "curriculum": "curriculum_learning", "layer_drop": "progressive_layer_drop",
    "quantize_training": "quantize_training",
}  # fmt: skip


def install(capture: Capture, module: Any) -> None:
    """Let the runtime make engines that keep the whole model; `module` is the one that has ``make_engine`` by name."""
    own = module.make_engine

    def make_engine(kind: Any, *, config: Any, optimizer: Any = None, mesh: Any = None, **given: Any) -> Any:
        if mesh is not None:
            raise StoppedError(
                "the runtime over a mesh of tensor, context, expert or pipeline ranks is not captured", user_line()
            )
        if given.get("policy") is not None:
            says = "the script's own function chooses the units; each block is planned as one"
            capture.leave_out("policy", "unknown", says)
        held = config if isinstance(config, Mapping) else json.loads(Path(config).read_text(encoding="utf-8"))
        said = {"ds_config": as_json(held)}
        if isinstance(optimizer, torch.optim.Optimizer):
            said["ds_config"].pop("optimizer", None)
            said["optimizer"] = optimizer_facts(optimizer)["optimizer"]
        return own(_captured(capture, kind, said), config=config, optimizer=optimizer, **given)

    module.make_engine = make_engine


def install_lightning(module: Any) -> None:
    """Let nothing be held of the engine behind Lightning's fit; `module` saves its checkpoints."""
    module.AfterFit = lambda _: SimpleNamespace(is_whole=lambda: None, save=lambda *_: None)


def _captured(capture: Capture, kind: Any, said: dict[str, Any]) -> Any:
    """The class of an engine of `kind` over a whole model; `said` is what the planner is told."""
    from zeroplan_runtime.arena import DTYPES
    from zeroplan_runtime.progress import TrainingProgress

    class CapturedRuntime(kind):  # type: ignore[misc]
        """The runtime's engine as scripts see it."""

        def __init__(self, model: Any, config: Any, optimizer: Any, *, ranks: Any, device: Any, policy: Any = None) -> None:
            torch.nn.Module.__init__(self)
            for name, key in _TECHNIQUES.items():
                if getattr(config, name) is not None:
                    raise StoppedError(f"{key} of the runtime under capture is not understood", user_line())
            self.module, self.settings, self.device, self.ranks, self.comm = model, config, device, ranks, ranks.shard
            self.optimizer, self.last_step, self.host = optimizer, None, None
            self.lr_scheduler: Any = None
            self.progress = TrainingProgress(config.loss_scaler(), config.grad_accum)
            self.techniques = SimpleNamespace(layer_drop=None, curriculum=None)
            if not config.counts_micro_batches:
                self.progress.boundary = True
            self.handed = Handed(capture, "zeroplan", model, said, keeps_grads=False)
            model.to(device=device, dtype=DTYPES[config.dtype])
            if optimizer is not None:
                self.handed.optimizer = optimizer
                optimizer.attach(take_step=self.step, drop_grads=self.zero_grad)
                optimizer.release_states()  # none is sharded
            self.handed.ready()

        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            """The model's own forward."""
            if self.settings.auto_cast:
                from zeroplan_runtime.pytree import cast_tensors

                inputs, kwargs = cast_tensors((inputs, kwargs), DTYPES[self.settings.dtype])
            return self.module(*inputs, **kwargs)

        def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
            """The loss's own backward."""
            parts = self.settings.grad_accum if scale_wrt_gas and self.settings.counts_micro_batches else 1
            scaled = loss / parts if parts > 1 else loss
            (scaled * self.scaler.scale if self.scaler.scale != 1.0 else scaled).backward(retain_graph=retain_graph)
            return scaled

        @contextlib.contextmanager
        def during_backward(self, *, boundary: bool) -> Iterator[None]:
            """Another's backward runs within it."""
            yield

        def step(self, lr_kwargs: Any = None) -> None:
            """Count the micro batch, and at a boundary the step."""
            boundary = self.is_gradient_accumulation_boundary()
            self.progress.micro_steps += 1
            self._step_applied = boundary
            if boundary:
                capture.spans.enter(STEP)
                self.progress.global_steps += 1
                self.progress.step_was_applied()
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step()
                capture.spans.stepped(self.optimizer if self.optimizer is not None else self)

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            """Micro batches in it are not counted."""
            before, self.progress.boundary = self.progress.boundary, False
            try:
                yield
            finally:
                self.progress.boundary = before

        @contextlib.contextmanager
        def gathered(self, name: str = "root") -> Iterator[None]:
            """Parameters are whole."""
            yield

        def full_tensors(self) -> Iterator[tuple[str, Any]]:
            """All parameters, then the state dict's other entries."""
            capture.spans.enter(SAVE)
            yield from self.module.state_dict().items()

        def module_state_dict(self) -> Any:
            """The whole model's, on the host of the first rank."""
            held = {name: value.detach().cpu() for name, value in self.full_tensors()}
            return held if self.ranks.world.rank == 0 else None

        def unit_names(self) -> list[str]:
            """The root alone: nothing is sharded."""
            return ["root"]

        def save_checkpoint(self, save_dir: Any, *_: Any, **__: Any) -> Any:
            """Note that it saves."""
            capture.spans.enter(SAVE)
            capture.engine_notes["saves"] = "full"
            return save_dir

        def save_16bit_model(self, save_dir: Any, *_: Any, **__: Any) -> Any:
            """Note that it saves."""
            return self.save_checkpoint(save_dir)

        def load_checkpoint(self, *_: Any, **__: Any) -> tuple[None, dict[str, Any]]:
            """Find none."""
            return None, {}

        def get_global_grad_norm(self) -> float:
            """An invented norm."""
            return 1.0

        def compile(self, *_: Any, **__: Any) -> None:
            """Run eagerly, as all that ``torch.compile`` is called for."""
            torch.compile(self.module)

        def nothing(self, *_: Any, **__: Any) -> None:
            """Nothing is held, nothing waits."""

        zero_grad = finish_step = drain = wait_parameters = wait_for_checkpoint = destroy = nothing

    CapturedRuntime.__name__ = CapturedRuntime.__qualname__ = kind.__name__
    return CapturedRuntime
