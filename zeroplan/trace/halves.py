"""A backward in two halves, as zero-bubble pipelines run it: gradients of activations first, those of weights behind them.

Note [Halves]
    torch's own functions run both halves on the meta device, so what they keep for each other is recorded and not modelled:
    ``stage_backward_input`` runs the graph to the stage's input and keeps it, with the gradients that arrive at each weight's
    product; ``stage_backward_weight`` then runs the products, parameter by parameter in their order, and drops the graph.
    What the stage receives is the embedding's output here. A first stage, which receives none, runs its whole backward in the
    second half. Source: torch/distributed/pipelining/_backward.py, stage.py (``backward_weight_one_chunk``)

    A weight's gradient belongs to the engine once those functions hold it no more, which is a product later where it is only
    added to an earlier one.

    torch 2.11, which plans are held to, adds up the gradients that arrived at a product before it runs the product, and so
    copies the only one; each copy stays until the next is made. 2.13 passes them on as they are. :func:`copied_gradients` makes
    those copies under it, too. Source: _backward.py of 2.11 (``summed_grad``)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from zeroplan.tape.expanded import Mark
from zeroplan.trace.recorder import StorageRecorder


@contextmanager
def copied_gradients() -> Iterator[None]:
    """Copy the gradient at each weight's product while ``stage_backward_weight`` runs. See Note [Halves]."""
    place: Any = torch.autograd
    plain = place.grad
    copies: list[Any] = []

    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
        if outputs and isinstance(outputs[0], GradientEdge):
            copies[:] = [one + 0 for one in grad_outputs]
            grad_outputs = copies
        return plain(outputs, inputs, grad_outputs=grad_outputs, **options)

    if "sum(" in inspect.getsource(stage_backward_weight):
        yield
        return
    place.grad = grad
    try:
        yield
    finally:
        place.grad = plain


class BackwardInHalves:
    """Runs one backward of a model in two halves. Make it before the forward."""

    def __init__(self, model: nn.Module, recorder: StorageRecorder) -> None:
        base: Any = model
        embedding = base.get_input_embeddings()
        apart = {id(param) for param in embedding.parameters()}
        self._recorder = recorder
        self._received: list[torch.Tensor] = []
        self._weights: list[Any] = [
            _Weight(recorder, index, param)
            for index, param in enumerate(model.parameters())
            if param.requires_grad and id(param) not in apart
        ]
        self._handle = embedding.register_forward_hook(self._receive)

    def _receive(self, _: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        received = output.detach().requires_grad_()
        self._received.append(received)
        return received

    def run(self, loss: torch.Tensor) -> None:
        """Run both halves."""
        self._handle.remove()
        _, groups = stage_backward_input([loss], None, self._received, iter(self._weights))
        self._recorder.mark(Mark.WEIGHTS_BEGIN)
        with copied_gradients():
            stage_backward_weight(iter(self._weights), groups)


class _Weight:
    """Stands for a parameter whose gradient torch's functions set."""

    grad_fn = None

    def __init__(self, recorder: StorageRecorder, index: int, param: torch.Tensor) -> None:
        self._recorder, self._index, self._param = recorder, index, param
        self.requires_grad = param.requires_grad

    def view_as(self, _: object) -> torch.Tensor:
        """Return a view of the parameter, by which they find its node in the graph."""
        return self._param.view_as(self._param)

    @property
    def grad(self) -> None:
        """What earlier micro batches left: none."""
        return None

    @grad.setter
    def grad(self, value: torch.Tensor) -> None:
        self._recorder.gradient_when_dropped(self._index, value)
