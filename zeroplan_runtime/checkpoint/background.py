"""Checkpoints whose files are written while training goes on.

Note [A save in the background]
    ``save_checkpoint`` agrees on everything as ever, copies masters and states to pinned memory of the Arena on a stream of
    its own, and returns. Until these copies are done no update begins: the device waits for them before the next one, the host
    does not. A thread of each rank then writes the rank's file. No thread takes part in a collective: one that has written
    leaves a note beside its file, and the first rank's thread waits for all notes, writes the metadata and gives the checkpoint
    its name. So the same holds at any moment as without: a checkpoint that has its name is whole, and the last good one stays.

    What went wrong is raised by the next call that needs the files (the next save, a load, ``wait_for_checkpoint``,
    ``destroy``), on every rank. There, all ranks first exchange how their own files went; so the first rank never waits for the
    note of a rank that could not leave one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint import atomic_files
from zeroplan_runtime.checkpoint.agreement import as_line, on_all_ranks
from zeroplan_runtime.checkpoint.manifest import Manifest
from zeroplan_runtime.checkpoint.planners import ShardSavePlanner, StateShard
from zeroplan_runtime.checkpoint.writer import ShardWriter, WrittenPiece
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.streams import Event, Stream

#: Seconds between two looks for the other ranks' notes.
_PAUSE = 0.02
#: Pieces in pinned memory begin on multiples of so many bytes.
_ALIGN = 64


def snapshot(shards: Iterable[StateShard], memory: torch.Tensor, stream: Stream, begun: Event) -> list[StateShard]:
    """Begins to copy `shards` to the host, on `stream`; the copies are whole once it is done.

    Args:
        shards: their tensors must not change meanwhile.
        memory: uint8, pinned; what does not fit in it is copied to memory of its own, and waited for.
        stream: of the copies.
        begun: recorded behind the work whose results are copied.
    """
    begun.wait(stream)
    found, begin = [], 0
    with stream.as_current():
        for shard in shards:
            tensor = shard.tensor().detach()
            end = begin + tensor.nbytes
            if end <= memory.numel():
                copy = memory[begin:end].view(tensor.dtype)
                copy.copy_(tensor, non_blocking=True)
                begin = -(-end // _ALIGN) * _ALIGN
            else:
                copy = tensor.to("cpu", copy=True)
            found.append(StateShard.of(shard.name, shard.numel, shard.offset, copy))
    return found


def plan_writes(engine: EngineParts, writer: ShardWriter, planner: ShardSavePlanner) -> tuple[list[SavePlan], Metadata]:
    """Returns what each rank writes and the metadata, as torch's saver agrees on them, without a coordinator."""
    first = engine.ranks.world.rank == 0
    planner.set_up_planner({}, None, first)
    writer.set_up_storage_writer(first)

    def own() -> SavePlan:
        return writer.prepare_local_plan(planner.create_local_plan())  # looks for the folder

    plans = on_all_ranks(engine, own, str(writer.path))
    whole, metadata = planner.create_global_plan(plans)
    return writer.prepare_global_plan(whole), metadata


class BackgroundSave:
    """One checkpoint on its way to the disk.

    Args:
        folder: the checkpoint's, unfinished.
        writer: of this rank's file.
        planner: gives the copies of this rank's shards.
        plans: what each rank writes.
        metadata: of the whole checkpoint.
        rank: this rank.
        copied: recorded behind the copies to the host.
        complete: writes what stands beside the ranks' files and gives the checkpoint its name; runs on the first rank.
        abandon: removes what was written.
    """

    def __init__(
        self,
        folder: Path,
        writer: ShardWriter,
        planner: ShardSavePlanner,
        plans: list[SavePlan],
        metadata: Metadata,
        rank: int,
        copied: Event,
        complete: Callable[[Manifest], None],
        abandon: Callable[[], None],
    ) -> None:
        self._folder, self._writer, self._planner, self._plans, self._metadata = folder, writer, planner, plans, metadata
        self._rank, self._copied, self._complete, self._abandon = rank, copied, complete, abandon
        self._fault: BadInput | None = None
        self._own = threading.Event()  # this rank's file is written, or cannot be
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"zeroplan save {folder.name}")  # the process waits for it
        self._thread.start()

    def protect(self, stream: Stream) -> None:
        """Makes `stream` wait for the copies to the host, before it changes what they copy."""
        self._copied.wait(stream)

    def wait(self, engine: EngineParts) -> None:
        """Blocks until the checkpoint is complete on every rank.

        Raises:
            BadInput: on every rank, when one could not write; what was saved before stays.
        """

        def own() -> None:
            self._own.wait()
            if self._fault is not None:
                raise self._fault

        def whole() -> None:
            self._thread.join()
            if self._fault is not None:
                raise self._fault

        try:
            on_all_ranks(engine, own, str(self._folder))
        except BadInput:
            self._stop.set()
            self._thread.join()
            raise
        on_all_ranks(engine, whole, str(self._folder))

    def _run(self) -> None:
        try:
            self._copied.synchronize()
            results = self._writer.write_data(self._plans[self._rank], self._planner).value()
            if self._rank:
                pieces = [one.storage_data for one in results]
                note = [[piece.place.offset, piece.place.length, piece.checksum] for piece in pieces]
                atomic_files.write_durably(self._note(self._rank), json.dumps(note).encode())
            self._own.set()
            if self._rank == 0:
                others = [self._await(rank) for rank in range(1, len(self._plans))]
                if self._stop.is_set():
                    self._abandon()
                    return
                self._writer.finish(self._metadata, [results, *others])
                assert self._writer.manifest is not None
                self._complete(self._writer.manifest)
        except Exception as fault:
            self._fault = as_line(fault, str(self._folder))
            if self._rank == 0:
                self._abandon()
        finally:
            self._own.set()

    def _note(self, rank: int) -> Path:
        return self._folder / f"{rank}.written"

    def _await(self, rank: int) -> list[WriteResult]:
        """Returns what `rank` has written, once it says so; nothing where the save is to stop."""
        note, plan = self._note(rank), self._plans[rank]
        while not note.exists():
            if self._stop.is_set():
                return []
            time.sleep(_PAUSE)
        name = f"{plan.storage_data.prefix}0.distcp"
        pieces = json.loads(note.read_bytes())
        note.unlink()
        return [
            WriteResult(item.index, length, WrittenPiece(_StorageInfo(name, offset, length), rank, checksum))
            for item, (offset, length, checksum) in zip(plan.items, pieces, strict=True)
        ]
