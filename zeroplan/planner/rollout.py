"""What vLLM takes of a GPU on which the model trains, too: a share of the card, all the time or between two steps.

Asleep it holds next to nothing. TRL empties torch's cache before it wakes vLLM, so between two steps there are what a step
leaves allocated, the process's own memory, and the share.
"""

from __future__ import annotations

from zeroplan.core.buffers import ALWAYS, Buffer, Phase
from zeroplan.core.generation import Colocated
from zeroplan.core.plan import PlanLine
from zeroplan.engines.base import Case
from zeroplan.engines.process import Outside
from zeroplan.engines.simulation import Simulation


def rollout_share(case: Case) -> tuple[int, bool]:
    """Return the bytes of a colocated vLLM on the case's card, and whether it sleeps while the model trains; 0 bytes where the
    card is not known.
    """
    asked, card = case.workload.technique(Colocated), case.cluster.usable_vram
    if asked is None or card is None:
        return 0, False
    return round(asked.share * card), asked.sleeps


def beside_rollout(simulation: Simulation, outside: Outside, share: int) -> int:
    """Return the bytes of one GPU while vLLM generates, awake between two steps."""
    return (simulation.held_after(Phase.STEP) or 0) + outside.total + share


def rollout_lines(case: Case, share: int, *, asleep: bool) -> list[PlanLine]:
    """Return the line of vLLM's share; none without one."""
    asked = case.workload.technique(Colocated)
    if asked is None or not share:
        return []
    phases = (Phase.GENERATION.value,) if asleep else tuple(phase.value for phase in (*ALWAYS, Phase.GENERATION))
    how = f"{asked.share:.0%} of the card: vLLM's weights, its forward and its cache"
    return [PlanLine(buffer=Buffer.ROLLOUT.value, place="hbm", bytes=share, phases=phases, formula=how)]
