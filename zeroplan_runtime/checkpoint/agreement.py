"""Work on files that either succeeds on every rank or raises the same one-line error on all of them."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from zeroplan.core.errors import BadInput
from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.engine_parts import EngineParts

T = TypeVar("T")

_REMEDIES = {
    errno.ENOSPC: "free space on that disk, or save to another",
    errno.EDQUOT: "raise the quota, or save to another disk",
    errno.EFBIG: "raise `ulimit -f`, or save to another file system",
    errno.ENOENT: "give a folder that every rank reaches by the same path",
    errno.EACCES: "give a folder that this user may write to",
    errno.EPERM: "give a folder that this user may write to",
    errno.EROFS: "give a folder that this user may write to",
}


def on_all_ranks(engine: EngineParts, part: Callable[[], T], where: str) -> list[T]:
    """Runs `part` on every rank; it must wait for no other rank.

    Args:
        engine: the engine.
        part: what each of them does.
        where: what to name in the error where `part` names nothing.

    Returns:
        What `part` returned on each rank.

    Raises:
        BadInput: on every rank, if `part` raised on any; names those on which it did.
        RankLost: when a rank died.
    """
    fault: Exception | None = None
    value: T | None = None
    try:
        value = part()
    except Exception as error:
        fault = error
    engine.activity.begin("waiting for the other ranks")
    comm = engine.ranks.world
    faults, values = zip(*comm.all_gather_object((as_line(fault, where) if fault is not None else None, value)), strict=True)
    failures = {rank: one for rank, one in enumerate(faults) if one is not None}
    if failures:
        raise common_fault(failures, comm.world_size) from (None if isinstance(fault, BadInput | OSError) else fault)
    return list(values)


def as_line(fault: BaseException, where: str) -> BadInput:
    """Returns `fault` as an error of one line: itself, or the system's words with the file and the remedy."""
    if isinstance(fault, BadInput):
        return fault
    if isinstance(fault, OSError):
        reason = os.strerror(fault.errno) if fault.errno else str(fault)
        return BadInput(reason, where=os.fsdecode(fault.filename or where), remedy=_REMEDIES.get(fault.errno or 0, ""))
    return BadInput(f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}", where=where)


def common_fault(failures: Mapping[int, BadInput], ranks: int) -> BadInput:
    """Returns the first rank's fault, with the numbers of all ranks that met it."""
    first = failures[min(failures)]
    same = [rank for rank, fault in sorted(failures.items()) if str(fault) == str(first)]
    if ranks == 1:
        return first
    seen = "all ranks" if len(same) == ranks else f"rank{'s' if same[1:] else ''} {', '.join(map(str, same[:8]))}"
    return BadInput(f"{first.what} (on {seen})", where=first.where, remedy=first.remedy)


@contextmanager
def by_torch(comm: Communicator, what: str, where: str) -> Iterator[None]:
    """A context for a save or load by torch.distributed.checkpoint, in which what fails on any rank is one line on all.

    Args:
        comm: the ranks.
        what: as in "could not save".
        where: what to name in the error where it names nothing.

    Raises:
        BadInput: as :func:`on_all_ranks`.
        RankLost: when a rank died.
    """
    try:
        with warnings.catch_warnings(), comm.naming_lost_ranks(what):
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank needs none
            yield
    except CheckpointException as fault:
        failures = {rank: as_line(error, where) for rank, (error, _) in fault.failures.items()}
        cause = None if all(isinstance(error, BadInput | OSError) for error, _ in fault.failures.values()) else fault
        raise common_fault(failures, comm.world_size) from cause
