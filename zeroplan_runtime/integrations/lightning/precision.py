"""Lightning's precision plugin for the runtime: the engine casts, scales, clips and steps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.engine import Engine
from zeroplan_runtime.pytree import cast_tensors

#: The section of a ds_config that each precision of Lightning's asks for. A model in 16 bits has fp32 masters in each.
SECTIONS = {"32-true": None, "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}
_MADE: dict[str, type[Any]] = {}


def precision_class(namespace: str) -> type[Any]:
    """Returns the plugin's class as a subclass of `namespace`'s ``Precision``."""
    if namespace not in _MADE:
        base = import_module(f"{namespace}.plugins.precision").Precision
        _MADE[namespace] = type("ZeroplanPrecision", (_EnginePrecision, base), {"__module__": __name__})
    return _MADE[namespace]


class _EnginePrecision:
    """Gives backward and step to the engine that :meth:`attach` is called with.

    Args:
        precision: a key of :data:`SECTIONS`.

    Attributes:
        precision: the same; Lightning shows it.

    Raises:
        BadInput: for another precision.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in SECTIONS:
            remedy = f"use one of {', '.join(SECTIONS)}"
            raise BadInput(f"precision {precision!r} is not supported", where="Trainer", remedy=remedy)
        self.precision = precision
        self._engine: Engine | None = None
        self._dtype = torch.float32

    def attach(self, engine: Engine | None, dtype: torch.dtype) -> None:
        """Gives the plugin the engine and the model's dtype; None takes it away."""
        self._engine, self._dtype = engine, dtype

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            BadInput: outside ``fit``, ``validate``, ``test`` and ``predict``.
        """
        if self._engine is None:
            raise BadInput("there is no engine outside trainer.fit()", where="ZeroplanStrategy")
        return self._engine

    def convert_input(self, data: Any) -> Any:
        """Returns `data` with its floating-point tensors in the model's dtype."""
        return data if self._dtype is torch.float32 else cast_tensors(data, self._dtype)

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, retain_graph: bool = False) -> None:
        """Computes the gradients of `tensor`, which Lightning has divided by the accumulated batches."""
        self.engine.backward(tensor, retain_graph, scale_wrt_gas=False)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """Runs the closure (forward and backward) and the engine's step.

        Raises:
            BadInput: for keywords of the optimizer's ``step()``.
        """
        if kwargs:
            raise BadInput(f"{', '.join(kwargs)}: the step takes no keywords", where="optimizer.step")
        result = closure()
        plugin: Any = self
        plugin._after_closure(model, optimizer)
        # A training_step that returned None skips the step, unless gradients of earlier micro batches wait for it.
        if result is None and model.automatic_optimization:
            if not self.engine.schedule.grads.has_grads:
                return result
            self.engine.set_gradient_accumulation_boundary(True)
            with self.engine.during_backward(boundary=True):
                pass  # there is nothing to add; what waits is reduced
        self.engine.step()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Checks that the engine clips as it is asked to; it does so in its step.

        Raises:
            BadInput: for clipping by value, and for another norm than the engine's.
        """
        if not clip_val:
            return
        clip = self.engine.settings.zero.step.gradient_clipping
        algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
        if algorithm != "norm" or clip_val != clip:
            raise BadInput(
                f"cannot clip gradients by {algorithm} to {clip_val}, as the engine clips to the norm {clip}",
                where="clip_gradients",
                remedy='give Trainer(gradient_clip_val=…), or ZeroplanStrategy(config={"gradient_clipping": …})',
            )
