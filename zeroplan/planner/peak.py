"""A GPU's memory at its peak, by family: gradients, activations, optimizer states and so on."""

from __future__ import annotations

from collections.abc import Mapping

from zeroplan.core.buffers import Buffer
from zeroplan.core.families import Family, family_of
from zeroplan.core.plan import PeakShare
from zeroplan.core.tape import ExpandedTape
from zeroplan.simulate.timeline import Note

_COMPUTED = frozenset({Buffer.ACTIVATION, Buffer.ACTIVATION_TEMP})


def peak_shares(alive: Mapping[tuple[Buffer, Note], int], tape: ExpandedTape, *, sharded: bool) -> tuple[PeakShare, ...]:
    """Bytes by family of the buffers that are alive, largest first; they add up to what is alive.

    Args:
        alive: bytes by buffer and note (:meth:`Timeline.alive_by_buffer_and_note`).
        tape: the model's tape that the run was laid over, whose modules the notes count.
        sharded: whether parameters are sharded (stage 3); whole parameters are then gathered ones.
    """
    loss = _loss_modules(tape)
    found: dict[Family, int] = {}
    for (buffer, note), count in alive.items():
        at_loss = buffer in _COMPUTED and note in loss
        family = Family.LOSS if at_loss else family_of(buffer, sharded=sharded)
        found[family] = found.get(family, 0) + count
    return tuple(PeakShare(what=what.value, bytes=count) for what, count in sorted(found.items(), key=lambda one: -one[1]))


def _loss_modules(tape: ExpandedTape) -> frozenset[int]:
    """Indices of the modules whose own tensors are the logits and the loss.

    They are the module that computes the loss (from the root down, the first that has several children: the root itself, or
    with adapters the model that they wrap), the modules around it, and its own linear layers without children.
    """
    children: dict[int, list[int]] = {}
    for index, module in enumerate(tape.modules):
        children.setdefault(module.parent, []).append(index)
    found, below = [], children.get(-1, [])
    while len(below) == 1:
        found += below
        below = children.get(below[0], [])
    heads = [index for index in below if tape.modules[index].type == "Linear" and index not in children]
    return frozenset([*found, *heads])
