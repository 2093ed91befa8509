"""The head and the loss of a causal language model over a chunk of tokens at a time, so that no logits of all tokens exist.

With a vocabulary of 128 k, the logits of 8,192 tokens take 2 GiB in 16 bits, and their gradient as much. Here the head computes
those of a chunk, takes their losses and lets them go. The backward computes each chunk's logits again, overwrites them by
their gradient, and multiplies it into the gradients of the hidden states and of the weight: one matrix product more in four.
Each product is the head's own on fewer rows, and sums of the weight's gradient stay in its flat buffer, as other layers' do.
Liger and TRL compute gradients in the forward instead, which keeps a whole gradient of the weight until the backward.
Sources: Liger-Kernel, ops/fused_linear_cross_entropy.py; Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language
Models".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zeroplan.core.errors import BadInput
from zeroplan.core.losses import IGNORED_LABEL, leaves_loss_to_function
from zeroplan_runtime.compiled import outside_graphs
from zeroplan_runtime.gradient_hooks import GradientTarget, direct_target, is_plain_linear
from zeroplan_runtime.kernels import cross_entropy, cross_entropy_grad
from zeroplan_runtime.local_tensors import is_distributed
from zeroplan_runtime.techniques.labelled_tokens import LabelledTokens, shifted_labels

_KEY = "ds_config.zeroplan.chunked_cross_entropy"


def attach_chunked_cross_entropy(
    model: nn.Module, tokens: int, picks: Mapping[nn.Module, LabelledTokens] | None = None
) -> Callable[[], None]:
    """Lets the causal language models in `model` compute head and loss together while they train.

    Their output's ``logits`` then refuse to be used: there are none.

    Args:
        model: holds modules of transformers' classes; others are left alone.
        tokens: of one chunk.
        picks: what hands the head labelled tokens alone, by model.

    Returns:
        A function that removes it.

    Raises:
        BadInput: when no module is of such a class, or its head is no plain linear layer.
    """
    heads = [
        ChunkedCrossEntropyHead(module, tokens, (picks or {}).get(module)) for module in model.modules() if _is_causal(module)
    ]
    if not heads:
        raise BadInput(
            f"no module of {type(model).__name__} is a causal language model of transformers", where=_KEY, remedy="leave it out"
        )

    def detach() -> None:
        for head in heads:
            head.remove()

    return detach


def _is_causal(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith("transformers.models.") and leaves_loss_to_function(kind.__name__)


class ChunkedCrossEntropyHead:
    """The head and the loss function of one model, and what its forward in flight has computed."""

    def __init__(self, module: Any, tokens: int, picks: LabelledTokens | None) -> None:
        self.module = module
        head: Any = module.get_output_embeddings()
        if not (isinstance(head, nn.Module) and is_plain_linear(head)):
            raise BadInput(
                f"the head of {type(module).__name__} is {type(head).__name__} and no plain linear layer",
                where=_KEY,
                remedy="leave the key out",
            )
        if is_distributed(head.weight):
            raise BadInput(
                "the head is a DTensor, of which ranks have parts",
                where=_KEY,
                remedy="leave the key out, or use no tensor parallelism",
            )
        self.tokens, self.picks = tokens, picks
        self.head: Any = head
        self._position = list(inspect.signature(type(module).forward).parameters).index("labels") - 1
        self._labels: torch.Tensor | None = None  # [tokens], shifted, while a forward with labels runs
        self._items: torch.Tensor | int | None = None
        self._ignore = IGNORED_LABEL
        self._loss: torch.Tensor | None = None  # what the head has computed in this forward
        self._own_forward = vars(head).get("forward")
        self._plain = head.forward
        self._own_loss = vars(module).get("_loss_function")
        self._loss_function: Callable[..., Any] = module.loss_function
        vars(head)["forward"] = self._forward
        module.loss_function = self._take_loss
        self._hooks = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),  # before labels are picked
            module.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Gives the model its own head and loss again."""
        for hook in self._hooks:
            hook.remove()
        del self.head.forward, self.module._loss_function
        if self._own_forward is not None:
            self.head.forward = self._own_forward
        if self._own_loss is not None:
            self.module.loss_function = self._own_loss

    @outside_graphs
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps the labels, which the head does not see, where the forward is one of training."""
        labels = args[self._position] if len(args) > self._position else kwargs.get("labels")
        if isinstance(labels, torch.Tensor) and module.training and torch.is_grad_enabled():
            if self.picks is None:
                labels = shifted_labels(labels, kwargs.get("shift_labels")).reshape(-1)
            self._labels = labels
            self._items, self._ignore = kwargs.get("num_items_in_batch"), kwargs.get("ignore_index", IGNORED_LABEL)

    @outside_graphs
    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss, one element, in place of the logits while a forward with labels runs."""
        if self._labels is None:
            found: torch.Tensor = self._plain(x)
            return found
        if torch.is_autocast_enabled(x.device.type):
            raise BadInput("the head runs under autocast", where=_KEY, remedy="use the bf16 or fp16 section of the ds_config")
        picked = self.picks.picked if self.picks is not None else None
        labels = (self._labels if picked is None else picked.reshape(-1)).to(x.device)
        rows = x.reshape(-1, x.shape[-1])
        if self._loss is not None or len(rows) != len(labels):
            said = "twice" if self._loss is not None else f"{len(rows)} rows for {len(labels)} labels"
            raise BadInput(f"{type(self.module).__name__} gives its head {said}", where=_KEY, remedy="leave the key out")
        items = self._items
        count = labels.ne(self._ignore).sum() if items is None else torch.as_tensor(items, device=x.device)
        weight, bias = self.head.weight, self.head.bias
        target = direct_target(self.head, rows)
        self._loss = LinearCrossEntropy.apply(rows, weight, bias, labels, count, self._ignore, self.tokens, target)
        return self._loss

    def _take_loss(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss that the head has computed, in place of one from logits."""
        if self._loss is None:
            return self._loss_function(logits, labels, *args, **kwargs)
        if logits.dim() or logits.data_ptr() != self._loss.data_ptr():
            raise BadInput(
                f"{type(self.module).__name__} changes the logits between its head and its loss",
                where=_KEY,
                remedy="leave the key out: a chunk's logits would lack that change",
            )
        return logits

    @outside_graphs
    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        loss, self._labels, self._loss, self._items = self._loss, None, None, None
        if loss is None or output is None:
            return output
        absent = torch.empty(0, device=loss.device).as_subclass(AbsentLogits)
        if isinstance(output, tuple):
            return (output[0], absent, *output[2:])
        output["logits"] = absent
        return output


class AbsentLogits(torch.Tensor):
    """Stands where a model's output has its logits, and refuses every use."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns an attribute, such as the device.

        Raises:
            BadInput: for everything else.
        """
        if getattr(function, "__name__", "") in ("__get__", "__repr__"):
            with torch._C.DisableTorchFunctionSubclass():
                return repr(cls) if function.__name__ == "__repr__" else function(*args, **(kwargs or {}))
        raise BadInput(
            "the output has no logits: the head and the loss were computed together, a chunk of tokens at a time",
            where=_KEY,
            remedy="leave the key out, or read logits from an evaluation",
        )


class LinearCrossEntropy(torch.autograd.Function):
    """The mean cross entropy of ``x Wᵀ + b``, whose logits exist for a chunk of rows at a time.

    The weight's gradient goes to a :class:`GradientTarget` in ``engine.backward()``, else to autograd.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        count: torch.Tensor,
        ignore: int,
        tokens: int,
        target: GradientTarget | None,
    ) -> torch.Tensor:
        """Returns one fp32 element.

        Args:
            ctx: autograd's context.
            x: [rows, width], the hidden states.
            weight: [vocabulary, width].
            bias: [vocabulary].
            labels: [rows], int64.
            count: one element that divides the sum of the losses.
            ignore: the label of rows without loss.
            tokens: rows of a chunk.
            target: takes the weight's gradient.
        """
        lse, losses = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
        for part in _chunks(len(x), tokens):
            logits = functional.linear(x[part], weight, bias)
            cross_entropy(logits, labels[part], ignore, out=(lse[part], losses[part]))
            del logits  # before the next ones are made
        ctx.save_for_backward(x, labels, lse, count, *(() if target is not None else (weight,)))
        ctx.weight, ctx.version, ctx.target = (weight if target is not None else None), weight._version, target
        ctx.bias, ctx.ignore, ctx.tokens = bias, ignore, tokens
        return losses.sum() / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of `x`, of the weight (None where it went to the target) and of the bias."""
        x, labels, lse, count, *saved = ctx.saved_tensors
        weight = saved[0] if saved else ctx.weight
        if weight._version != ctx.version:  # in the words of autograd, which checks what it saves itself
            raise RuntimeError("a weight needed for gradient computation has been modified by an inplace operation")
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        direct = ctx.target is not None and ctx.target.is_due(ctx)
        scale = (grad / count).float()
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight) if needs_weight and not direct else None
        grad_bias = torch.zeros_like(ctx.bias) if needs_bias else None
        for part in _chunks(len(x), ctx.tokens):
            logits = functional.linear(x[part], weight, ctx.bias)
            cross_entropy_grad(logits, labels[part], lse[part], scale, ctx.ignore, out=logits)
            if grad_x is not None:
                torch.mm(logits, weight, out=grad_x[part])
            if grad_weight is not None:
                grad_weight.addmm_(logits.t(), x[part])
            elif needs_weight:
                ctx.target.accumulate_weight_grad(logits, x[part])
            if grad_bias is not None:
                grad_bias += logits.sum(0)
            del logits
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _chunks(rows: int, tokens: int) -> Iterator[slice]:
    for begin in range(0, rows, tokens):
        yield slice(begin, min(begin + tokens, rows))
