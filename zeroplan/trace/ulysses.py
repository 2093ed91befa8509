"""Ulysses sequence parallelism as DeepSpeed adds it to transformers: one of the ranks that share a sample's tokens.

Note [Ulysses]
    Each rank has the next S / n tokens of a sample of S, and computes all but attention on them. Attention needs all tokens and
    takes 1/n of the heads: queries, keys and values change places by one all-to-all each, and so does the result. Where there
    are more ranks than KV heads, each head is repeated first. An exchange allocates a packed copy of what is sent, what
    arrives, and a copy of that in the layout that attention takes. Positions of all tokens are gathered at every call, and
    masks are dropped, since attention is causal by the positions.

    The steps, and how long Python keeps their tensors, are those of DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py
    (``UlyssesSPAttentionHF``, ``UlyssesSPDataLoaderAdapter``) and sequence/layer.py (``_dim_zero_all_to_all``). The loss of a
    rank's tokens is the model's own, of labels that were shifted before they were split: transformers 5.17,
    integrations/deepspeed.py (``deepspeed_sp_compute_loss``), whose sums over ranks are scalars. Paper: arXiv 2309.14509.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan.trace.ranks import Ranks, receiving

_Attention = Callable[..., tuple[torch.Tensor, Any]]


class _Exchanged(torch.autograd.Function):
    """An all-to-all over the first dimension, forward and backward."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor) -> torch.Tensor:
        with receiving():
            return torch.empty_like(sent)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        sent = grads[0].contiguous()
        with receiving():
            return torch.empty_like(sent)


def _heads_for_tokens(states: torch.Tensor, ranks: int, repeats: int) -> torch.Tensor:
    """Exchange this rank's tokens of all heads for all tokens of its heads: [s, B, H, D] to [S, B, H / n, D]."""
    if repeats > 1:
        states = states.repeat_interleave(repeats, dim=2)
    tokens, batch, heads, dim = states.shape
    states = states.reshape(tokens, batch, ranks, heads // ranks, dim)
    states = states.permute(2, 0, 1, 3, 4).contiguous()
    arrived: torch.Tensor = _Exchanged.apply(states)
    return arrived.reshape(ranks * tokens, batch, heads // ranks, dim).contiguous()


def _tokens_for_heads(context: torch.Tensor, ranks: int) -> torch.Tensor:
    """Exchange all tokens of this rank's heads for its tokens of all heads: [S, B, W / n] to [s, B, W]."""
    whole, batch, width = context.shape
    context = context.reshape(ranks, whole // ranks, batch, width).contiguous()
    arrived: torch.Tensor = _Exchanged.apply(context)
    own = arrived.permute(1, 2, 0, 3).reshape(whole // ranks, batch, -1).contiguous()
    del arrived  # goes before what was sent
    return own


def _gathered(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Gather a tensor of every rank into a list, as NCCL does: through one flat buffer."""
    with receiving():
        parts = [torch.empty_like(tensor) for _ in range(ranks)]
        flat = tensor.new_empty((ranks, *tensor.shape))
    del flat
    return parts


class UlyssesRank(Ranks):
    """One of `ranks` ranks that share each sample's tokens."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._name = ""

    def lay_out(self, model: Any) -> None:
        """Remember which attention the model asks for; parameters are whole on every rank."""
        self._name = model.config._attn_implementation

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's tokens of a batch, with their positions and with labels that are shifted already."""
        ids = batch["input_ids"]
        own = (ids.shape[0], ids.shape[1] // self._ranks)
        tokens, positions, labels = (ids.new_empty(own) for _ in range(3))
        return {"input_ids": tokens, "position_ids": positions, "shift_labels": labels, "labels": labels}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Put the exchange around the attention that transformers calls by the model's name for it."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

        core = functions[self._name]
        functions[self._name] = self._around(core)
        try:
            yield
        finally:
            functions[self._name] = core

    def _around(self, core: _Attention) -> _Attention:
        ranks = self._ranks

        def attention(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, Any]:
            _require_causal(query, value, kwargs)
            repeats = max(1, ranks // key.shape[1])
            query, key, value = (states.permute(2, 0, 1, 3) for states in (query, key, value))
            positions = _gathered(kwargs["position_ids"], ranks)
            kwargs["position_ids"] = torch.cat(positions, dim=1)
            sent_q, sent_k, sent_v = (
                _heads_for_tokens(query, ranks, 1),
                _heads_for_tokens(key, ranks, repeats),
                _heads_for_tokens(value, ranks, repeats),
            )
            sent_q = sent_q.permute(1, 2, 0, 3).contiguous()
            sent_k = sent_k.permute(1, 2, 0, 3).contiguous()
            sent_v = sent_v.permute(1, 2, 0, 3).contiguous()
            if repeats > 1:
                module.num_key_value_groups = sent_q.shape[1] // sent_k.shape[1]
            context, weights = core(module, sent_q, sent_k, sent_v, None, *args, **kwargs)
            context = context.permute(1, 0, 2, 3)
            context = context.reshape(*context.shape[:2], -1)
            output = _tokens_for_heads(context, ranks).permute(1, 0, 2)
            return output, weights

        return attention


def _require_causal(query: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Refuse what DeepSpeed's exchange has no shape for.

    Raises:
        BadInput: values of another width than queries, or a model that hands no positions to its attention.
    """
    if value.shape[-1] != query.shape[-1] or kwargs.get("position_ids") is None:
        raise BadInput(
            "DeepSpeed's Ulysses takes heads of one width, and attention that is told the tokens' positions",
            where="--ulysses",
            remedy="use --ulysses 1",
        )
