"""MLPs that run tile by tile over the tokens, as DeepSpeed's ``TiledMLP`` does (ALST's tiled compute).

Note [Tiled MLP]
    The forward runs each tile without a graph and joins the results. The backward runs each tile's forward again, then its
    backward, so that the inner tensors are those of one tile. The weights' gradients of the tiles add up in place, and are
    complete with the last one; those of the input go into one tensor of zeros that is there from the beginning.

    Where autograd would add to a gradient that is there, a dispatch mode makes it add out of place. So each tile's gradients
    start anew here, and hooks add them in place at the moment at which autograd does.

    Of many tiles the first ones and the last are traced. Those between allocate and free what the one before them did, so
    that only what they leave, an output or a loss, is made. Such a trace holds for one number of tokens.

    Source: DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py (TiledMLP). Paper: arXiv 2506.13996, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput

#: Tiles that are traced at most.
MOST_TRACED = 16
_LAYERS = ("gate_proj", "up_proj", "down_proj")
#: The tile whose backward runs, and how many there are; None outside.
_tile: tuple[int, int] | None = None
#: Sums of gradients of the tiles so far, by the id of the parameter.
_sums: dict[int, torch.Tensor] = {}


def tile_mlps(model: nn.Module, tiles: int) -> None:
    """Let the MLPs of the model's blocks run in so many tiles. Raises BadInput: a model without gated MLPs."""
    found = [
        module for module in model.modules() if all(isinstance(getattr(module, name, None), nn.Module) for name in _LAYERS)
    ]
    if not found:
        raise BadInput("this model has no gated MLPs of linear layers", where="--tiled-mlp", remedy="leave it out")
    for module in found:
        module.forward = partial(_forward, partial(type(module).forward, module), tiles)


def repeats(index: int, count: int, tensor: torch.Tensor) -> bool:
    """Return whether a tile of so many is left out of the trace of a tensor without numbers, as it repeats the one before."""
    return tensor.is_meta and MOST_TRACED - 2 < index < count - 1


@contextmanager
def one_tile(index: int, count: int) -> Iterator[None]:
    """What runs inside is one tile's: its weights' gradients add up with those of the others."""
    global _tile
    _tile = index, count
    try:
        yield
    finally:
        _tile = None


def held_back(param: torch.Tensor) -> bool:
    """Add a parameter's new gradient to those of earlier tiles; return whether tiles are still to come."""
    if _tile is None or _tile[1] == 1:
        return False
    index, count = _tile
    assert param.grad is not None
    if index:
        _sums[id(param)].add_(param.grad)
    else:
        _sums[id(param)] = param.grad
    param.grad = None
    if index + 1 < count:
        return True
    param.grad = _sums.pop(id(param))
    return False


def _forward(run: Callable[[torch.Tensor], torch.Tensor], tiles: int, hidden_states: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = TiledCall.apply(run, hidden_states, tiles)
    return found


class TiledCall(torch.autograd.Function):
    """A function of hidden states, [B, S, H] to [B, S, H], over tiles of S. See Note [Tiled MLP]."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor, tiles: int) -> torch.Tensor:
        """Run every tile without a graph."""
        ctx.run, ctx.tiles = run, tiles
        ctx.save_for_backward(hidden_states)
        pieces = list(torch.chunk(hidden_states, tiles, dim=-2))
        made: list[torch.Tensor] = []
        for index, piece in enumerate(pieces):
            made.append(torch.empty_like(made[-1]) if repeats(index, len(pieces), piece) else run(piece))
        return torch.cat(made, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Run every tile again, with its backward."""
        (hidden_states,) = ctx.saved_tensors
        rows = hidden_states.detach()
        rows = rows.reshape(-1, rows.shape[-1])
        incoming = grads[0].reshape(rows.shape)
        outgoing = torch.zeros_like(rows)
        pieces = list(torch.chunk(rows, ctx.tiles, dim=0))
        begin = 0
        for index, piece in enumerate(pieces):
            piece.requires_grad_(hidden_states.requires_grad)
            end = begin + piece.shape[0]
            if repeats(index, len(pieces), piece):
                begin = end
                continue
            if piece.requires_grad:
                piece.register_post_accumulate_grad_hook(partial(add_into, outgoing[begin:end]))
            with one_tile(index, len(pieces)):
                with torch.enable_grad():
                    output = ctx.run(piece)
                backward_within(output, incoming[begin:end])
            begin = end
        return None, outgoing.view_as(hidden_states), None


def add_into(place: torch.Tensor, piece: torch.Tensor) -> None:
    """Add a piece's gradient to its part of the whole, as autograd adds to a gradient that is there."""
    assert piece.grad is not None
    place.add_(piece.grad)
    piece.grad = None


def backward_within(output: torch.Tensor, grad: torch.Tensor) -> None:
    """Run a backward within another, as ``torch.autograd.backward`` does, under the name that the recorder knows."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)
