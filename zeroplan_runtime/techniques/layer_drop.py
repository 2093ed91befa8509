"""Leaves blocks out of a step, as progressive layer dropping asks: see :mod:`zeroplan.core.layer_drop`.

DeepSpeed handed θ to the model's forward as ``pld_theta``, and the user's model left layers out. Here the engine does.

Note [Dropped blocks]
    A block that is left out returns its input. One that is kept with the probability p < 1 returns x + (f(x) − x) / p, so that
    the mean over the draws is f(x), as in evaluation; for residual blocks that scales what they add (arXiv 2010.13369,
    Algorithm 1, lines 13 and 14).
    The draw is of a step: all its micro batches, and the second forward of gradient checkpointing, leave the same blocks out.
    It follows from the step's number and from a seed that the first rank gives to all, so the ranks' collectives match.
    At stage 3 nothing gathers a block that is left out. Its gradients are zeros, which are reduced when the backward has
    ended: whether a rank's data gives its parameters gradients in another way (a penalty on weights, a tied one) is not known
    to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan.core.layer_drop import LAYER_DROP, ProgressiveLayerDrop
from zeroplan_runtime.checks import refuse_copy
from zeroplan_runtime.compiled import outside_graphs
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.units import find_blocks

_MAX_SEED = (1 << 63) - 1


class LayerDrop:
    """The blocks of one model, and which of them the present step keeps.

    Attributes:
        rule: probabilities and draws.
        seed: of the draws, alike on all ranks.
        step: the steps before the one that the last choice was for.
        probabilities: of each block, in that step.
        kept: whether that step keeps each block.
    """

    __reduce_ex__ = refuse_copy

    def __init__(self, rule: ProgressiveLayerDrop, blocks: list[nn.Module], schedule: Schedule, seed: int) -> None:
        self.rule, self.seed, self.step = rule, seed, 0
        self.probabilities, self.kept = (1.0,) * len(blocks), (True,) * len(blocks)
        self._schedule = schedule
        self._in_tuple: bool | None = None  # how blocks return hidden states; told by the first, which is always kept
        self._undo = [_replace_forward(block, DroppableBlock(self, index, block)) for index, block in enumerate(blocks)]
        units = {id(unit.module): unit for unit in schedule.model_states.units}
        self._units = [units.get(id(block)) for block in blocks]

    @property
    def theta(self) -> float:
        """θ of the last choice."""
        return self.rule.theta_at(self.step)

    def choose(self, step: int, *, active: bool) -> None:
        """Draws the blocks of the step after `step` others; without `active` all are kept, at full weight."""
        self.step, layers = step, len(self.kept)
        if active:
            self.probabilities = self.rule.keep_probabilities(step, layers)
            self.kept = self.rule.kept(step, layers, self.seed)
        else:
            self.probabilities, self.kept = (1.0,) * layers, (True,) * layers
        dropped = [unit for unit, kept in zip(self._units, self.kept, strict=True) if unit is not None and not kept]
        self._schedule.leave_out(frozenset(dropped))

    @outside_graphs
    def run(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs block `index`: its own `forward`, scaled, or nothing, and its input is returned.

        Raises:
            BadInput: for a block that does not get and return hidden states of one shape alone.
        """
        given = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(given, torch.Tensor):
            raise _unknown("get hidden states first, or by the name hidden_states")
        if not self.kept[index]:
            return (given,) if self._in_tuple else given
        output = forward(*args, **kwargs)
        self._in_tuple = isinstance(output, tuple)
        found = output[0] if isinstance(output, tuple) and len(output) else output
        if not isinstance(found, torch.Tensor) or found.shape != given.shape:
            raise _unknown("return hidden states of the shape that they get")
        if isinstance(output, tuple) and len(output) > 1:
            raise _unknown("return hidden states alone")
        if self.probabilities[index] < 1.0:
            found = torch.lerp(given, found, 1.0 / self.probabilities[index])
        return (found,) if self._in_tuple else found

    def remove(self) -> None:
        """Gives the blocks their own forwards back."""
        for undo in self._undo:
            undo()

    def state_dict(self) -> dict[str, int]:
        """Returns the state for a checkpoint; the step is the engine's own."""
        return {"seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int] | None) -> None:
        """Continues from :meth:`state_dict`; None, from a training without layer dropping, keeps the seed."""
        if state is not None:
            self.seed = state["seed"]


def make_layer_drop(
    rule: ProgressiveLayerDrop | None, model: nn.Module, schedule: Schedule, ranks: MeshRanks
) -> LayerDrop | None:
    """Returns the layer dropping that a config asks for; None for none. Every rank must call it.

    Raises:
        BadInput: for a model whose blocks are not one stack of one class, and where ranks hold parts of the model.
    """
    if rule is None:
        return None
    if ranks.degrees:
        names = ", ".join(ranks.degrees)
        raise BadInput(f"it is not supported with {names}", where=LAYER_DROP, remedy="use a mesh of dp and cp")
    blocks = find_blocks(model)
    if len(blocks) < 2 or len({name.rpartition(".")[0] for name in blocks}) > 1 or len(set(map(type, blocks.values()))) > 1:
        raise _unknown("are one stack of one class")
    seed = torch.tensor(torch.initial_seed() & _MAX_SEED, device=schedule.model_states.arena.device).reshape(1)
    return LayerDrop(rule, list(blocks.values()), schedule, int(ranks.world.broadcast_from_first(seed)))


def _unknown(what: str) -> BadInput:
    remedy = "leave the section out, or give a decoder or encoder whose blocks do"
    return BadInput(f"it is known for models whose blocks {what}", where=LAYER_DROP, remedy=remedy)


class DroppableBlock:
    """Where a block stands, and its own forward. It is in the block's ``__dict__``, so that no copy of the block is made."""

    __slots__ = ("drop", "forward", "index", "own")
    __reduce_ex__ = refuse_copy

    def __init__(self, drop: LayerDrop, index: int, block: nn.Module) -> None:
        self.drop, self.index = drop, index
        self.forward, self.own = block.forward, vars(block).get("forward")


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    place: DroppableBlock = vars(block)["_layer_drop"]
    return place.drop.run(place.index, place.forward, args, kwargs)


def _replace_forward(block: nn.Module, place: DroppableBlock) -> Callable[[], None]:
    """Lets the block's forward be run by the layer dropping; returns what undoes that."""
    vars(block)["_layer_drop"] = place
    block.forward = MethodType(_forward, block)

    def restore() -> None:
        del block.forward, vars(block)["_layer_drop"]
        if place.own is not None:
            block.forward = place.own

    return restore
