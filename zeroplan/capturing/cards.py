"""The cards on which a captured script runs: the one thing of its run that a recording leaves open."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroplan.capturing.answer import CapturedRun, answer
from zeroplan.capturing.result import Captured
from zeroplan.core.cluster import Cluster
from zeroplan.core.gpus import DRIVER_RESERVE, GPUS, Gpu
from zeroplan.core.plan import MemoryPlan
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.tape.sizes import KernelDevice


@dataclass(frozen=True, slots=True)
class CardPlan:
    """A card and the script's plan on it."""

    gpu: Gpu
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class FittingCards:
    """Where a captured script runs.

    Attributes:
        run: the answer on the machine that was named, or captured for.
        cards: NVIDIA's, the first of the table with each size of memory, smallest first; those without bf16 where the script
            computes so are left out.
        least: bytes of the smallest card on which its plan says that it fits, were there one of every size.
    """

    run: CapturedRun
    cards: tuple[CardPlan, ...]
    least: int

    @property
    def first(self) -> CardPlan | None:
        """The smallest card on which it fits."""
        return next((one for one in self.cards if one.plan.fits), None)


def fitting_cards(captured: Captured, cluster: Cluster, config: AllocatorConfig | None = None) -> FittingCards:
    """Plan a captured script on every card.

    Cards whose kernels take the same sizes share one simulation.

    Args:
        captured: what the script did.
        cluster: the machine that was named.
        config: the caching allocator's settings; None for torch's defaults.
    """
    run = answer(captured, cluster, config)
    computed = any(not isinstance(size, int) for size in captured.sizes)
    runs = {_kernels(cluster.gpu, computed=computed): run.timeline}
    nvidia = [gpu for gpu in GPUS.values() if gpu.capability > (0, 0)]
    able = [gpu for gpu in nvidia if gpu.bf16 or not captured.workload.get("bf16")]
    cards: list[CardPlan] = []
    for gpu in sorted({gpu.memory: gpu for gpu in reversed(able)}.values(), key=lambda gpu: gpu.memory):
        other, kernels = replace(cluster, gpu=gpu, vram=gpu.memory), _kernels(gpu, computed=computed)
        found = answer(captured, other, config, known=runs.get(kernels))
        runs[kernels] = found.timeline
        cards.append(CardPlan(gpu, found.report.plans[0]))
    interval = run.report.plans[0].gpu.interval
    assert interval is not None
    high = interval[1]
    return FittingCards(run, tuple(cards), min(high + DRIVER_RESERVE, -(-16 * high // 15)))  # as Cluster.usable_vram has it


def _kernels(gpu: Gpu, *, computed: bool) -> tuple[int, KernelDevice | None]:
    """What of a card decides the sizes of a recording, some of which its kernels compute."""
    return gpu.workspace, KernelDevice.of(gpu) if computed else None
