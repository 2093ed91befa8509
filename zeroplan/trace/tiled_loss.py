"""A causal language model's head and loss, tile by tile over the tokens, as DeepSpeed's ``TiledFusedLogitsLoss`` runs them.

Note [Tiled loss]
    The forward runs each tile's head and loss, and its backward at once, so that the logits are those of one tile. Gradients of
    the hidden states go into one tensor of zeros, which is all that waits for the model's backward; those of the head's weight
    add up in place and are complete before it begins. See Note [Tiled MLP] for why gradients are added by hooks here.

    Source: DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py (TiledFusedLogitsLoss). Paper: arXiv 2506.13996,
    section 3.1. A program calls the model's body and gives the function its head, its loss and labels that are shifted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan.trace.tiled import add_into, backward_within, one_tile, repeats

_IGNORED = -100


def tile_loss(model: nn.Module, tiles: int) -> None:
    """Let the model's head and loss run in so many tiles.

    Raises:
        BadInput: a model that is no causal language model of transformers.
    """
    if not all(hasattr(model, name) for name in ("lm_head", "base_model", "loss_function")):
        raise BadInput("this model has no head and loss of tokens", where="--tiled-loss", remedy="leave it out")
    model.forward = partial(_forward, model, tiles)


def _forward(model: Any, tiles: int, labels: torch.Tensor, **inputs: Any) -> Any:
    hidden = model.base_model(**inputs).last_hidden_state
    shifted = nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:].contiguous()

    def loss_of(piece: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(piece)
        found: torch.Tensor = model.loss_function(
            logits=logits, labels=None, vocab_size=model.config.vocab_size, shift_labels=targets
        )
        return found

    return SimpleNamespace(loss=TiledLossCall.apply(loss_of, hidden, shifted, tiles))


class TiledLossCall(torch.autograd.Function):
    """The mean of the losses of tiles of hidden states, [B, S, H], and labels, [B, S]. See Note [Tiled loss]."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        labels: torch.Tensor,
        tiles: int,
    ) -> torch.Tensor:
        """Run every tile with its backward."""
        rows = hidden.detach()
        rows = rows.reshape(-1, rows.shape[-1])
        targets = labels.reshape(-1)
        outgoing = torch.zeros_like(rows)
        pieces, answers = list(torch.chunk(rows, tiles, dim=0)), torch.chunk(targets, tiles, dim=0)
        losses: list[torch.Tensor] = []
        begin = 0
        for index, (piece, answer) in enumerate(zip(pieces, answers, strict=True)):
            piece.requires_grad_()
            end = begin + piece.shape[0]
            if repeats(index, len(pieces), piece):
                losses.append(torch.empty_like(losses[-1]))
                begin = end
                continue
            piece.register_post_accumulate_grad_hook(partial(add_into, outgoing[begin:end]))
            with one_tile(index, len(pieces)):
                with torch.enable_grad():
                    loss = loss_of(piece, answer)
                losses.append(loss)
                backward_within(loss, torch.ones_like(loss) / len(pieces))
            begin = end
        ctx.save_for_backward(outgoing.view_as(hidden))
        return torch.stack([loss.detach() for loss in losses]).mean()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return what the forward has made, scaled in place."""
        (outgoing,) = ctx.saved_tensors
        outgoing *= grads[0]
        return None, outgoing, None, None
