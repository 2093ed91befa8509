"""What the blocks of a layout recompute in the backward: nothing, all but products and attention, or all."""

from __future__ import annotations

from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Compilation
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.search.layout_counts import ships_tape
from zeroplan.techniques.compiled import CompiledTechnique

_NOTHING: dict[str, Any] = {"gradient_checkpointing": False}
_ALL: dict[str, Any] = {"gradient_checkpointing": True}
_SELECTIVE = ("checkpoint_policy", "selective")


def recomputed(request: Ask) -> str:
    """Return by which policy the request's blocks are recomputed; empty where they are not."""
    return str(request.value("checkpoint_policy")) if request.value("gradient_checkpointing") else ""


def recomputations(plain: Ask, checkpointing: bool | None) -> tuple[dict[str, Any], ...]:
    """Return what the blocks may recompute, as fields of a request, least first.

    Args:
        plain: the request under data parallelism alone; the selective policy needs a tape that is shipped.
        checkpointing: what was asked for; None leaves the choice to the search.
    """
    if checkpointing is not None:
        return ({"gradient_checkpointing": checkpointing},)
    if plain[CompiledTechnique.compile] == Compilation.CHECKPOINTED:
        return (_ALL,)
    selective = _ALL | dict([_SELECTIVE])
    return (_NOTHING, selective, _ALL) if _ships(plain.replace(**selective)) else (_NOTHING, _ALL)


def lacks_tape(again: dict[str, Any], request: Ask) -> bool:
    """Return whether the layout's ranks share blocks, and these recompute by a policy that only whole ones have tapes of."""
    return _SELECTIVE in again.items() and request.tp * request.cp * request.ep > 1


def _ships(request: Ask) -> bool:
    try:
        return ships_tape(resolve(request))
    except BadInput:
        return False
