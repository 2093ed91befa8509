"""The head and the loss over labelled tokens alone.

A masked language model has labels on some 15 % of its tokens and a fine-tune with masked prompts often on fewer than half, but
transformers computes the logits of all. :func:`attach_labelled_tokens` picks the labelled rows of the hidden states where the
base model hands them to the head, and gives the loss the labels of those rows: the sum over rows is the same sum without its
zeros. Source: "DeepSpeed: Accelerating BERT training", sparse output processing.

The number of rows decides the shapes, so the host must know it: it is counted when the forward begins, copied beside the
computation, and waited for where the head begins. Evaluation and calls without labels are left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zeroplan.core.errors import BadInput
from zeroplan.core.losses import IGNORED_LABEL, leaves_loss_to_function, scores_each_token
from zeroplan_runtime.compiled import outside_graphs
from zeroplan_runtime.techniques.fused_loss import causal_lm_loss

_KEY = "ds_config.zeroplan.labelled_tokens_only"


def shifted_labels(labels: torch.Tensor, shifted: torch.Tensor | None) -> torch.Tensor:
    """Returns each token's next label [batch, tokens]: `shifted` where it is given, else `labels` moved by one."""
    return functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:] if shifted is None else shifted


def attach_labelled_tokens(model: nn.Module, found: dict[nn.Module, LabelledTokens] | None = None) -> Callable[[], None]:
    """Lets the language models in `model` compute logits and loss of labelled tokens alone while they train.

    Their output's ``logits`` is then [1, labelled tokens, vocabulary], in the order of the tokens.

    Args:
        model: holds modules of transformers' classes; others are left alone.
        found: gets what picks the rows of each such module.

    Returns:
        A function that removes it.

    Raises:
        BadInput: when no module is of such a class.
    """
    picks = {module: LabelledTokens(module) for module in model.modules() if _picks_rows(module)}
    if not picks:
        raise BadInput(
            f"no module of {type(model).__name__} is a causal or masked language model of transformers whose loss is known",
            where=_KEY,
            remedy="leave the key out",
        )

    if found is not None:
        found.update(picks)

    def detach() -> None:
        for pick in picks.values():
            pick.remove()

    return detach


def _picks_rows(module: nn.Module) -> bool:
    kind = type(module)
    known = leaves_loss_to_function(kind.__name__) or scores_each_token(kind.__name__)
    return known and kind.__module__.startswith("transformers.models.") and _base_of(module) is not None


def _base_of(module: nn.Module) -> nn.Module | None:
    base = getattr(module, getattr(module, "base_model_prefix", "") or "-", None)
    return base if isinstance(base, nn.Module) and base is not module else None


class LabelledTokens:
    """The hooks of one language model, and what its forward in flight has picked."""

    def __init__(self, module: nn.Module) -> None:
        base = _base_of(module)
        assert base is not None
        self.module = module
        self.is_causal = leaves_loss_to_function(type(module).__name__)
        self._position = list(inspect.signature(type(module).forward).parameters).index("labels") - 1
        self._labels: torch.Tensor | None = None  # [tokens], shifted for a causal model, while its forward runs
        self._count: HostCount | None = None
        #: [1, labelled tokens], filled where the base model ends; None but while a forward with labels runs.
        self.picked: torch.Tensor | None = None
        self._restore = self._wrap_loss() if self.is_causal else None
        self._hooks = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            base.register_forward_hook(self._pick),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        if self._restore is not None:
            self._restore()

    @outside_graphs
    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Counts the labels, and passes in their place a tensor that will hold those of the picked rows."""
        by_position = len(args) > self._position
        labels = args[self._position] if by_position else kwargs.get("labels")
        if not (isinstance(labels, torch.Tensor) and module.training and torch.is_grad_enabled()):
            return args, kwargs
        if self.is_causal:
            labels = shifted_labels(labels, kwargs.pop("shift_labels", None))
        self._labels = labels.reshape(-1)
        self._count = HostCount(self._labels.ne(IGNORED_LABEL))
        self.picked = self._labels.new_empty(0)
        if by_position:
            return (*args[: self._position], self.picked, *args[self._position + 1 :]), kwargs
        return args, {**kwargs, "labels": self.picked}

    @outside_graphs
    def _pick(self, base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Hands the head the labelled rows [1, labelled tokens, width] of the hidden states [batch, tokens, width]."""
        labels, count, picked = self._labels, self._count, self.picked
        if labels is None or count is None or picked is None:
            return output
        hidden = output[0]
        if hidden.dim() != 3 or hidden.shape[0] * hidden.shape[1] != labels.numel():
            raise BadInput(
                f"{type(base).__name__} gives hidden states {list(hidden.shape)} for {labels.numel()} labels",
                where=_KEY,
                remedy="leave the key out",
            )
        labelled = torch.argsort(labels.ne(IGNORED_LABEL), descending=True, stable=True)[: count.wait()]
        picked.resize_(1, len(labelled)).copy_(labels[labelled])
        rows = hidden.flatten(0, 1).index_select(0, labelled.to(hidden.device)).unsqueeze(0)
        if isinstance(output, tuple):
            return (rows, *output[1:])
        output[next(iter(output))] = rows
        return output

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._labels = self._count = self.picked = None

    def _wrap_loss(self) -> Callable[[], None]:
        """Lets the model's loss take the labels of the picked rows, which need no shift; returns what undoes it."""
        module: Any = self.module
        own = vars(module).get("_loss_function")
        if own is not None and own is not causal_lm_loss:
            raise BadInput(
                f"{type(module).__name__}.loss_function is not transformers' own", where=_KEY, remedy="leave the key out"
            )
        loss = module.loss_function

        def of_picked(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            shifted = {} if self.picked is None else {"shift_labels": self.picked}
            return loss(logits, labels, *args, **{**kwargs, **shifted})

        module.loss_function = of_picked

        def restore() -> None:
            del module._loss_function
            if own is not None:
                module.loss_function = own

        return restore


class HostCount:
    """How many elements of a mask hold, counted on its device and read by the host later."""

    def __init__(self, mask: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._count = mask.sum()
        if mask.is_cuda:
            pinned = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
            self._count = pinned.copy_(self._count, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> int:
        """Returns the count once the device has it."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._count)
