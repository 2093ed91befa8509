"""The candidates: every configuration that one might run, as lean records in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.workload import Compilation, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Engine

#: Without a global batch, micro batches are tried up to this.
MOST_MICRO_BATCH = 256
MOST_GLOBAL_BATCH = 1 << 24
#: Where swap files go until the user names a place: a local disk.
NVME_PATH = "/local_nvme"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration.

    Attributes:
        zero: sharding and offload.
        workload: batches, precision, checkpointing.
        alloc_conf: what PYTORCH_ALLOC_CONF should hold.
        effort: how far it is from the defaults; of two that are equally fast, the lower one is recommended.
        index: its place in the user's list, -1 outside one.
        engine: the engine with settings of its own, where the user's ds_config has any; None for that of the search.
        unmodelled: keys of its file that no figure holds.
    """

    zero: ZeroConfig
    workload: Workload
    alloc_conf: str = ""
    effort: int = 0
    index: int = -1
    engine: Engine | None = None
    unmodelled: tuple[Unmodelled, ...] = ()

    @property
    def family(self) -> tuple[int, str, str, bool, Compilation | None]:
        """The candidate's stage, offloads, checkpointing and what is compiled. A table shows one row of each family."""
        zero, work = self.zero, self.workload
        devices = (zero.offload_optimizer.device, zero.offload_param.device)
        return (zero.stage, *devices, work.gradient_checkpointing, work.compile)


def batch_splits(
    global_batch: int | None, layout: ParallelLayout, *, micro_batch: int | None = None, grad_accum: int | None = None
) -> list[tuple[int, int]]:
    """Return the (micro batch, accumulation) pairs that make the global batch, smallest micro batch first.

    Raises:
        BadInput: when the batch does not divide by the ranks and by what is fixed.
    """
    if global_batch is None:
        accum = grad_accum or 1
        if micro_batch is not None:
            return [(micro_batch, accum)]
        return [(1 << power, accum) for power in range(MOST_MICRO_BATCH.bit_length())]
    if not 1 <= global_batch <= MOST_GLOBAL_BATCH:
        remedy = f"use 1 to {MOST_GLOBAL_BATCH:,}"
        raise BadInput(f"{global_batch} is out of range", where="--global-batch", remedy=remedy)
    ranks = layout.dp
    fixed = ranks * (micro_batch or 1) * (grad_accum or 1)
    if global_batch % fixed:
        near = max(fixed, round(global_batch / fixed) * fixed)
        said = [f"{ranks} ranks" if ranks > 1 else "1 rank"]
        said += [f"micro batch {micro_batch}"] if micro_batch else []
        said += [f"accumulation {grad_accum}"] if grad_accum else []
        raise BadInput(
            f"{global_batch} does not divide by {' × '.join(said)}", where="--global-batch", remedy=f"use {near}, for one"
        )
    share = global_batch // ranks
    pairs = [(m, share // m) for m in range(1, min(share, 4096) + 1) if share % m == 0]
    kept = [(m, a) for m, a in pairs if (micro_batch is None or m == micro_batch) and (grad_accum is None or a == grad_accum)]
    if not kept:
        fits = (
            f"micro batch {micro_batch} × accumulation {grad_accum}"
            if micro_batch and grad_accum
            else f"{micro_batch or share}"
        )
        what = f"{global_batch} is not {ranks} {'ranks' if ranks > 1 else 'rank'} × {fits}"
        raise BadInput(what, where="--global-batch", remedy="leave one of them out")
    return kept


def all_candidates(
    zeros: list[tuple[ZeroConfig, int]],
    base: Workload,
    splits: list[tuple[int, int]],
    checkpointing: tuple[bool, ...],
    alloc_confs: tuple[str, ...],
    unmodelled: tuple[Unmodelled, ...] = (),
    compilations: tuple[Compilation | None, ...] = (None,),
) -> Iterator[Candidate]:
    """Yield the product of all choices, in a fixed order. Where there is a choice of `compilations`, blocks that checkpoint do
    so within their graphs, which computes less again.
    """
    for again, compiled in product(checkpointing, compilations):
        if again and compiled is Compilation.BLOCKS and len(compilations) > 1:
            compiled = Compilation.CHECKPOINTED
        for micro, accum in splits:
            workload = base.but(micro_batch=micro, grad_accum=accum).checkpointed(again).compiled(compiled)
            for zero, effort in zeros:
                for conf in alloc_confs:
                    yield Candidate(zero, workload, conf, effort + bool(conf), unmodelled=unmodelled)
