"""Functions of a model that other kernels take over while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

#: Replaces an attribute: its owner, its name, its new value.
Replace = Callable[[Any, str, Any], None]
#: Returns the loss of hidden states, [B, S, H], the head's weight and labels, [B, S].
HeadLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def replaced() -> Iterator[Replace]:
    """Yield a function that replaces attributes of modules and of Python's modules until the context ends."""
    before: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        yield replace
    finally:
        for owner, name, value in reversed(before):
            if isinstance(owner, nn.Module):
                delattr(owner, name)  # the class has its method
            else:
                setattr(owner, name, value)


def without_adapters(model: Any) -> Any:
    """Return the model that peft wraps; the model itself without adapters."""
    wrapped = getattr(model, "get_base_model", None)
    return wrapped() if wrapped is not None else model


def fused_head(model: nn.Module, replace: Replace, loss_of: HeadLoss, *, evaluates: bool = False) -> None:
    """Let a causal language model in training compute its loss of the hidden states: its head's module is not called.

    Without labels, in a model without ``lm_head``, and in evaluation nothing changes, unless it `evaluates` so, too.
    """
    base = without_adapters(model)
    if hasattr(base, "lm_head"):
        fused = partial(_forward, base, base.forward, loss_of, evaluates)
        replace(base, "forward", update_wrapper(fused, base.forward))  # a Trainer reads its arguments' names


def _forward(
    model: Any, plain: Any, loss_of: HeadLoss, evaluates: bool, *args: Any, labels: torch.Tensor | None = None, **inputs: Any
) -> Any:
    if labels is None or not (model.training or evaluates):
        return plain(*args, labels=labels, **inputs)
    from transformers.modeling_outputs import CausalLMOutput  # one that engines' hooks find the loss in

    outputs = model.base_model(*args, **inputs)
    return CausalLMOutput(loss=loss_of(outputs[0], model.lm_head.weight, labels))
