"""How long a step of FSDP2 takes, by playing what the host, the GPU and the links do for each of its units.

Note [A step of units]
    The host issues a unit's gather, then its kernels, and runs ahead of the GPU as far as it is faster. A gather needs the
    buffer of the one before it, so it begins when that has been copied out: one unit is gathered ahead. In the backward the
    next unit is gathered before this one's kernels are issued, and a unit's gradients are packed when the reduction of the one
    before has ended. Gathers and reductions follow each other on the links. The root has what lies outside the blocks: it is
    gathered before anything can run, stays gathered, and is reduced behind everything.

    Collectives' kernels keep some of the GPU's multiprocessors, and kernels beside them have the rest. Kernels with one
    thread block a multiprocessor for their whole life (grouped products) wait for those: they take twice as long. Collectives
    wait for processors, too. On two H200s (``benchmarks.layouts.contention``) products took 14 and 31 % longer beside NCCL's,
    sums 20, attention 8, for 18 % of the processors; collectives 1.2 to 1.8 times as long.

    Where the host waits for the GPU within a block, as for the numbers of tokens that experts exchange, its lead is lost.
    Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (pre_forward, pre_backward, post_backward),
    _fsdp_collectives.py (foreach_all_gather, foreach_reduce); NVIDIA/nccl, src/enqueue.cc (a thread block a channel).
"""

from __future__ import annotations

from dataclasses import dataclass

#: Of the time of a kernel that keeps all multiprocessors, what it takes longer beside a collective.
_PERSISTENT = 1.0
#: How much longer a collective takes beside kernels.
_SLOWER = 0.5


@dataclass(frozen=True, slots=True)
class UnitPass:
    """Seconds of a unit's forward or backward.

    Attributes:
        busy: of the GPU, collectives of other groups included.
        issued: of the host.
        persistent: of `busy`, kernels that keep every multiprocessor.
        waits: how often the host waits for the GPU within it.
    """

    busy: float = 0.0
    issued: float = 0.0
    persistent: float = 0.0
    waits: int = 0


@dataclass(frozen=True, slots=True)
class ShardedUnit:
    """Seconds of what is done for one unit.

    Attributes:
        forward, backward: its computation; the root's backward is what lies behind the last block's.
        gather: of its parameters, on the links.
        copied: casts before and copies behind a gather, on the GPU.
        reduce: of its gradients, on the links.
        packed: copies before a reduction, on the GPU.
    """

    forward: UnitPass = UnitPass()
    backward: UnitPass = UnitPass()
    gather: float = 0.0
    copied: float = 0.0
    reduce: float = 0.0
    packed: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitStep:
    """A micro batch of a root and equal blocks. See Note [A step of units].

    Attributes:
        root: the unit of what lies outside the blocks.
        block: one of the blocks' units.
        blocks: their number.
        head: the forward and backward behind the last block: the head and the loss.
        taken: the part of the multiprocessors that the kernels of gathers, and of reductions, keep.
        resharded: whether blocks are gathered again for the backward.
    """

    root: ShardedUnit
    block: ShardedUnit
    blocks: int
    head: tuple[UnitPass, UnitPass]
    taken: tuple[float, float]
    resharded: bool

    def seconds(self, *, reduces: bool, update: UnitPass = UnitPass()) -> float:
        """Return the seconds of one micro batch, from its first kernel to the end of its last one.

        Args:
            reduces: whether gradients are reduced, as after the last micro batch of a step.
            update: what follows then: the optimizer.
        """
        root, block, clocks = self.root, self.block, _Clocks(self.taken)
        copied = clocks.gpu = clocks.collective(root.gather, 0.0) + root.copied
        clocks.compute(root.forward, block.gather)
        for number in range(self.blocks):
            gather = clocks.collective(block.gather, copied, block.forward.busy if number else 0.0)
            clocks.gpu = copied = max(clocks.gpu, gather) + block.copied
            clocks.compute(block.forward, block.gather if number + 1 < self.blocks else 0.0)
        clocks.compute(self.head[0], 0.0)
        gathered = clocks.collective(block.gather, copied, self.head[1].busy) if self.resharded else 0.0
        clocks.compute(self.head[1], block.gather if self.resharded else 0.0)
        reduced = 0.0
        for left in range(self.blocks, 0, -1):
            ahead = block.gather if self.resharded and left > 1 else 0.0
            busy = block.backward.busy - ahead * (1 + _SLOWER)
            if self.resharded:
                clocks.gpu = copied = max(clocks.gpu, gathered) + block.copied
                if left > 1:
                    gathered = clocks.collective(block.gather, copied, block.backward.busy)
            clocks.compute(block.backward, ahead, block.reduce if reduces and left < self.blocks else 0.0)
            if reduces:
                clocks.gpu = max(clocks.gpu, reduced) + block.packed
                reduced = clocks.collective(block.reduce, clocks.gpu, max(0.0, busy) if left > 1 else 0.0)
        clocks.compute(root.backward, 0.0, block.reduce if reduces else 0.0)
        if reduces:
            clocks.gpu = max(clocks.gpu, reduced) + root.packed
            clocks.gpu = clocks.collective(root.reduce, clocks.gpu)
            clocks.compute(update, 0.0)
        return clocks.gpu


class _Clocks:
    """When the host, the GPU and the links are free."""

    def __init__(self, taken: tuple[float, float]) -> None:
        self.host = self.gpu = self.links = 0.0
        self._taken = taken

    def compute(self, one: UnitPass, gathers: float, reduces: float = 0.0) -> None:
        """Issue and run a pass, beside a gather and a reduction of so many seconds."""
        slowed, left = 0.0, one.busy
        for beside, taken in zip((gathers, reduces), self._taken, strict=True):
            part = min(left, beside) / one.busy if one.busy else 0.0
            slowed += part * (one.persistent * _PERSISTENT + (one.busy - one.persistent) * taken)
            left -= min(left, beside)
        busy = (one.busy + slowed) / (one.waits + 1)
        for waited in range(one.waits + 1):
            begin = max(self.gpu, self.host) if waited else self.gpu
            self.host = (begin if waited else self.host) + one.issued / (one.waits + 1)
            self.gpu = max(begin + busy, self.host)

    def collective(self, seconds: float, after: float, beside: float = 0.0) -> float:
        """Run a collective that is issued now, once what it needs is there; returns its end.

        Args:
            seconds: of it alone.
            after: when what it needs is there.
            beside: the seconds of kernels that run at the same time.
        """
        self.links = max(self.links, self.host, after) + seconds_beside(seconds, beside)
        return self.links


def seconds_beside(collective: float, kernels: float) -> float:
    """Return the seconds of a collective that takes so many alone, while kernels of so many run."""
    return collective + min(collective * _SLOWER, kernels * _SLOWER / (1 + _SLOWER))
