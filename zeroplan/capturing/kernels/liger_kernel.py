"""liger_kernel: its kernels over models of transformers, its layers and losses, as :mod:`zeroplan.trace.liger` has them.

Without a model at hand Liger changes the classes of a family, so models that are made afterwards have the kernels here.

Source: liger-kernel 0.8.5, ``transformers/monkey_patch.py``, ``transformers/auto_model.py``, ``transformers/rms_norm.py``.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroplan.capturing.hooks.imports import changes
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line
from zeroplan.techniques.liger import FAMILIES, OTHERS, USUAL, Liger
from zeroplan.trace.liger import CrossEntropy, FusedLinearCrossEntropy, GatedUnit, RmsNorm, Rotary, put_kernels

#: Liger's switches, and the technique's parts.
_SWITCHES = {"rope": "rope", "rms_norm": "rms_norm", "swiglu": "glu", "geglu": "glu",
             "fused_linear_cross_entropy": "fused_loss", "cross_entropy": "loss"}  # fmt: skip


def _apply(model: Any, switches: dict[str, Any]) -> None:
    """Let one model run with the kernels that the switches leave on; a family that Liger does not list runs as it is."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = str(getattr(getattr(base, "config", None), "model_type", ""))
    if kind in OTHERS:
        raise StoppedError(f"no rule knows what Liger's kernels for {kind} allocate on a GPU", user_line())
    off = {part for key, part in _SWITCHES.items() if switches.get(key) is False}
    on = {part for key, part in _SWITCHES.items() if switches.get(key)}
    kernels = Liger(tuple((set(USUAL) | on) - off)).kernels(kind)
    if kernels is not None:
        changes(nn.functional, sys.modules[type(base).__module__])
        put_kernels(base, kernels, setattr)


def _to_instance(model: Any, **switches: Any) -> None:
    """``_apply_liger_kernel_to_instance``, which the Trainer calls."""
    _apply(model, switches)


def _to_family(kind: str, *_: Any, model: Any = None, **switches: Any) -> None:
    """``apply_liger_kernel_to_KIND``."""
    if model is not None:
        return _apply(model, switches)
    from transformers import PreTrainedModel

    plain: Any = PreTrainedModel
    own = plain.post_init

    def post_init(made: Any, *args: Any, **kwargs: Any) -> None:
        own(made, *args, **kwargs)
        if getattr(made.config, "model_type", None) == kind:
            _apply(made, switches)

    changes(plain)
    plain.post_init = post_init
    return None


class AutoLigerKernelForCausalLM:
    """A causal model with the kernels, from its config."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """As that of ``AutoModelForCausalLM``; Liger's switches are taken out."""
        from transformers import AutoModelForCausalLM

        switches = {key: kwargs.pop(key) for key in _SWITCHES if key in kwargs}
        model = AutoModelForCausalLM.from_pretrained(name, *args, **kwargs)
        _apply(model, switches)
        return model


class LigerRMSNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, *_: Any, in_place: bool = True, **__: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.in_place = nn.Parameter(torch.ones(hidden_size)), eps, in_place

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H]."""
        found: torch.Tensor = RmsNorm.apply(hidden, self.weight, self.in_place)
        return found


class LigerSwiGLUMLP(nn.Module):
    """The MLP of Llama's config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> Any:
        """[..., H]."""
        return self.down_proj(GatedUnit.apply(self.gate_proj(hidden), self.up_proj(hidden)))


class LigerCrossEntropyLoss(nn.Module):
    """The loss of logits [tokens, words]."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return the loss."""
        return CrossEntropy.apply(logits, labels)


class LigerFusedLinearCrossEntropyLoss(LigerCrossEntropyLoss):
    """The loss of hidden states [tokens, H] with the head's weight [words, H]."""

    def forward(self, weight: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor, bias: Any = None) -> Any:  # type: ignore[override]
        """Return the loss."""
        if bias is not None:
            raise StoppedError("no rule knows what Liger's fused loss with a bias allocates on a GPU", user_line())
        return FusedLinearCrossEntropy.apply(hidden, weight, labels)


def liger_rotary_pos_emb(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Queries and keys [B, heads, S, D], turned."""
    return Rotary.apply(q, k, cos, sin)


def _named() -> dict[str, Any]:
    plain = (AutoLigerKernelForCausalLM, LigerRMSNorm, LigerSwiGLUMLP, LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss,
             liger_rotary_pos_emb)  # fmt: skip
    found: dict[str, Any] = {one.__name__: one for one in plain}
    found |= {f"apply_liger_kernel_to_{kind}": partial(_to_family, kind) for kind in (*FAMILIES, *OTHERS)}
    return {**found, "_apply_liger_kernel_to_instance": _to_instance}


RULES = _named()
