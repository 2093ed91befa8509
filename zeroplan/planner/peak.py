"""A GPU's memory at its peak, by family: gradients, activations, optimizer states and so on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zeroplan.core.buffers import Buffer
from zeroplan.core.families import Family, family_of
from zeroplan.core.plan import PeakShare
from zeroplan.simulate.timeline import Note
from zeroplan.tape.expanded import ExpandedTape

_COMPUTED = frozenset({Buffer.ACTIVATION, Buffer.ACTIVATION_TEMP})


def peak_shares(alive: Mapping[tuple[Buffer, Note], int], tape: ExpandedTape, *, sharded: bool) -> tuple[PeakShare, ...]:
    """Bytes by family of the buffers that are alive, largest first; they add up to what is alive.

    Args:
        alive: bytes by buffer and note (:meth:`Timeline.alive_by_buffer_and_note`).
        tape: the model's tape that the run was laid over, whose modules the notes count.
        sharded: whether parameters are sharded (stage 3); whole parameters are then gathered ones.
    """
    found: dict[Family, int] = {}
    family = family_at_peak(tape, sharded=sharded)
    for (buffer, note), count in alive.items():
        name = family(buffer, note)
        found[name] = found.get(name, 0) + count
    return tuple(PeakShare(what=what.value, bytes=count) for what, count in sorted(found.items(), key=lambda one: -one[1]))


def family_at_peak(tape: ExpandedTape, *, sharded: bool) -> Callable[[Buffer, Note], Family]:
    """Return a function that tells the family of a buffer by its note; what the loss's own modules compute is the loss's."""
    loss = _loss_modules(tape)

    def family(buffer: Buffer, note: Note) -> Family:
        return Family.LOSS if buffer in _COMPUTED and note in loss else family_of(buffer, sharded=sharded)

    return family


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
