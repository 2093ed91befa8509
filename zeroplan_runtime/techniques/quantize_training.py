"""Rounds the weights that forward and backward see, by the schedule of :mod:`zeroplan.core.quantize_training`.

Note [Rounded weights]
    A unit's weights are rounded in place where it is unsharded: after each step below stage 3, and after each all-gather at
    stage 3, on the stream of the all-gathers. They are rounded from the masters, or from the shards, each time, so no rounding
    is rounded again. Every rank has the whole weights there, and rounds them alike: nothing is sent for it. What the
    checkpoint holds are the masters; ``save_16bit_model`` and ``module_state_dict`` give the rounded weights.
    Rounding is done by torch's operations in memory of the Arena, in fp32. (torchao's fake quantisation allocates tensors as
    large as the weight, and has no groups that are a part of the whole tensor.)
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from zeroplan.core.arena.layout_setup import RuntimeSetup, require_masters
from zeroplan.core.errors import BadInput
from zeroplan.core.quantize_training import CHUNK, QUANTIZE_TRAINING, QuantizeTraining
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.unit_state import UnitState


def require_quantisable(setup: RuntimeSetup, ranks: MeshRanks) -> None:
    """Refuses what has no masters on the device, and ranks that hold parts of a weight.

    Raises:
        BadInput: as :func:`zeroplan.core.arena.layout_setup.require_masters`, and for meshes with tp, pp or ep.
    """
    require_masters(setup.param_dtype, setup.stage, setup.offload_optimizer)
    if ranks.degrees:
        names = ", ".join(ranks.degrees)
        raise BadInput(f"it is not supported with {names}", where=QUANTIZE_TRAINING, remedy="use a mesh of dp and cp")


class WeightQuantiser:
    """Rounds the weights of units, in as many groups each as the rule says.

    Args:
        rule: bits by step.
        units: their trained matrices are rounded; vectors, such as biases and norms' weights, are not.
        workspace: fp32 [rule.words(largest weight)].

    Attributes:
        step: how many steps there were before the one that the next rounding is for.

    Raises:
        BadInput: for a weight that does not divide into the groups.
    """

    def __init__(self, rule: QuantizeTraining, units: list[UnitState], workspace: torch.Tensor) -> None:
        self.rule, self.step = rule, 0
        groups = rule.quantize_groups
        self._bounds = workspace[: 3 * groups].view(3, groups)
        parts = workspace[3 * groups :]
        self._part, self._noise = parts.chunk(2) if rule.stochastic else (parts, parts[:0])
        self._random = torch.Generator(workspace.device)
        for unit in units:
            for name, weight in _weights(unit):
                if weight.numel() % groups:
                    what = f"{name!r} has {weight.numel()} elements, which do not divide into {groups} groups"
                    raise BadInput(what, where=f"{QUANTIZE_TRAINING}.quantize_groups", remedy="write fewer")

    @torch.no_grad()
    def round(self, unit: UnitState) -> None:
        """Rounds the weights of `unit`, which hold what the last step has left, in place."""
        rounding = self.rule.at(self.step)
        if rounding is None:
            return
        if self.rule.stochastic:  # alike on all ranks, and in the forward and the backward
            self._random.manual_seed(random.Random(f"{unit.name}:{self.step}").getrandbits(63))
        for _, weight in _weights(unit):
            rows = weight.view(self.rule.quantize_groups, -1)
            at_once = max(1, CHUNK // rows.shape[1])
            for first in range(0, len(rows), at_once):
                self._round(rows[first : first + at_once], rounding.bits, rounding.real)

    def _round(self, rows: torch.Tensor, bits: int, real: float) -> None:
        """Rounds rows that each have a scale, in place; `real` is the share of them that stays."""
        count, size = rows.shape
        pieces = [slice(begin, begin + CHUNK) for begin in range(0, size, CHUNK)]
        lowest, highest, scale = (one[:count] for one in self._bounds)
        for number, piece in enumerate(pieces):
            part = self._copied(rows[:, piece])
            torch.amin(part, 1, out=lowest if number == 0 else scale)
            if number:
                torch.minimum(lowest, scale, out=lowest)
            torch.amax(part, 1, out=highest if number == 0 else scale)
            if number:
                torch.maximum(highest, scale, out=highest)
        levels = 1 << bits
        if self.rule.symmetric:
            torch.maximum(lowest.abs_(), highest.abs_(), out=scale).mul_(2 / levels)
        else:
            torch.sub(highest, lowest, out=scale).mul_(1 / levels)
        if not self.rule.symmetric:
            scale.copy_(torch.where(scale == 0, lowest.abs(), scale))  # all alike: one step from zero
        scale.masked_fill_(scale == 0, 1.0)  # all zero
        if not self.rule.symmetric:
            torch.div(lowest, scale, out=highest).round_().mul_(scale)
            zero = highest.unsqueeze(1)
        least, most = (-levels // 2, levels // 2 - 1) if self.rule.symmetric else (0, levels - 1)
        by = scale.unsqueeze(1)
        for piece in pieces:
            given = rows[:, piece]
            part = self._copied(given) if len(pieces) > 1 else self._part[: given.numel()].view_as(given)
            if not self.rule.symmetric:
                part.sub_(zero)
            part.div_(by)
            if self.rule.stochastic:
                part.add_(self._noise[: part.numel()].view_as(part).uniform_(-0.5, 0.5, generator=self._random))
            part.round_().clamp_(least, most).mul_(by)
            if not self.rule.symmetric:
                part.add_(zero)
            if real:
                part.mul_(1.0 - real).add_(given, alpha=real)
            given.copy_(part)

    def _copied(self, given: torch.Tensor) -> torch.Tensor:
        """Copies [rows, size] to the workspace, in fp32."""
        return self._part[: given.numel()].view(given.shape).copy_(given)


def _weights(unit: UnitState) -> Iterator[tuple[str, torch.Tensor]]:
    """The trained parameters of two dimensions and more, by name, where the unit is unsharded."""
    if unit.trainable is None:
        return
    for position, view in enumerate(unit.trainable.views(unit.trainable.full)):
        if view.dim() > 1:
            yield unit.name_of(position), view
