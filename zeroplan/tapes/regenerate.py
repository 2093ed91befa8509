"""Traces many models in several processes, into a folder of tape files. Used by :mod:`zeroplan.tapes.ship`.

Note [Regenerating]
    A unit of work is one family under one variant: models of a family differ in widths only, so the first is traced at
    several points and the others borrow the forms of its sizes (:class:`zeroplan.trace.api.Donors`). Each finished tape is
    a file of its own under ``DIR/.parts``, renamed into place; when all are there, or time is up, each model's are packed
    into one. So a run that was cut off loses only the tapes in the making, and the next goes on where it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from zeroplan.core.model_config import auto_class_of
from zeroplan.core.plumbing.files import replace_file
from zeroplan.models import catalog
from zeroplan.tape.options import TraceOptions
from zeroplan.tapes import shipped

#: Seconds of one trace relative to a decoder's, by family: two stacks, several ranges of lengths, or mixtures of experts.
_COST = {"t5": 4, "whisper": 4, "gemma3": 4, "gemma3_text": 4, "gemma2": 3, "modernbert": 3, "deepseek_v2": 3, "deepseek_v3": 3}


#: By model, the variants to trace it with.
Wanted = Mapping[str, Sequence[TraceOptions]]


@dataclass(frozen=True, slots=True)
class TraceTask:
    """Models of one family and the variant to trace them with."""

    models: tuple[str, ...]
    options: TraceOptions
    order: tuple[int, int]  # by place of the variant, then by expected cost, largest first

    @property
    def label(self) -> str:
        """A short name of the task for the progress lines."""
        return f"{self.models[0]}{f' and {len(self.models) - 1} like it' if len(self.models) > 1 else ''}: {self.options.key}"


@dataclass(frozen=True, slots=True)
class TapeFolder:
    """A folder in which tapes are gathered."""

    path: str

    def part(self, model: str, key: str, ending: str = "json") -> str:
        """The file of one tape (``json``), or of why there is none (``failed``)."""
        return os.path.join(self.path, ".parts", model.replace("/", "--"), f"{key}.{ending}")

    def done(self, model: str, *, again: str | None = None) -> set[str]:
        """Options keys whose tapes, or failures, are at hand; `again`: but for packed failures whose reason contains it."""
        packed = shipped.read_file(shipped.file_of(model, self.path))
        failed = packed.get(shipped.FAILED, {})
        keys = set(packed) | {key for key, reason in failed.items() if again is None or again not in reason}
        with contextlib.suppress(FileNotFoundError):
            keys |= {name.rpartition(".")[0] for name in os.listdir(os.path.dirname(self.part(model, ""))) if "." in name}
        return keys

    def parts(self, model: str) -> Iterator[tuple[str, str, str]]:
        """(options key, ending, path) of what is not packed yet."""
        base = os.path.dirname(self.part(model, ""))
        for name in sorted(os.listdir(base)) if os.path.isdir(base) else ():
            key, _, ending = name.rpartition(".")
            if ending in ("json", "failed"):
                yield key, ending, os.path.join(base, name)


def units(entries: Sequence[catalog.Entry], wanted: Wanted, todo: Callable[[str, str], bool]) -> list[TraceTask]:
    """The work, in the order in which to begin it. `todo` says whether a model's variant is to be traced."""
    families: dict[tuple[str, str], list[catalog.Entry]] = {}
    for entry in entries:
        families.setdefault((str(entry.config["model_type"]), auto_class_of(entry.config)), []).append(entry)
    found = []
    places: dict[TraceOptions, int] = {}
    for variants in wanted.values():
        for place, options in enumerate(variants):
            places.setdefault(options, place)
    for options, place in places.items():
        for (family, _), members in families.items():
            models = tuple(e.id for e in members if options in wanted[e.id] and todo(e.id, options.key))
            if models:
                found.append(TraceTask(models, options, (place // 20, -len(models) * _COST.get(family, 1))))
    return sorted(found, key=lambda unit: unit.order)


def trace_unit(unit: TraceTask, folder: TapeFolder, deadline: float) -> list[tuple[str, str]]:
    """Trace a unit's models; returns (model, reason) of those that cannot be. Stops at the deadline (``time.time()``)."""
    from zeroplan.tape.codec import to_json
    from zeroplan.trace.api import Donors

    donors, failed = Donors(), []
    for model in unit.models:
        if time.time() > deadline:
            break
        entry = catalog.find(model)
        assert entry is not None
        try:
            content: Any = to_json(donors.trace(entry.config, auto_class_of(entry.config), unit.options))
            ending = "json"
        except Exception as error:  # whatever one model's code raises, the others go on
            content, ending = _reason(error), "failed"
            failed.append((model, content))
        path = folder.part(model, unit.options.key, ending)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_file(path, json.dumps(content, separators=(",", ":")).encode())
    return failed


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def pack(model: str, folder: TapeFolder, software: str) -> int:
    """Merge a model's new tapes into its file; returns how many it holds."""
    content = shipped.read_file(shipped.file_of(model, folder.path))
    made, failed = content.pop(shipped.SOFTWARE, {}), content.pop(shipped.FAILED, {})
    parts = list(folder.parts(model))
    for key, ending, part in parts:
        for table in (content, made, failed):
            table.pop(key, None)
        with open(part, encoding="utf-8") as stream:
            (content if ending == "json" else failed)[key] = json.load(stream)
        if ending == "json":
            made[key] = software
    if parts:
        shipped.write_file(shipped.path_of(model, folder.path), {**content, shipped.SOFTWARE: made, shipped.FAILED: failed})
    for _, _, part in parts:
        os.unlink(part)
    if parts:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(parts[0][2]))
    return len(content)


def _begin_worker() -> None:
    import torch

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # transformers' advice, once a model


def run(
    work: Sequence[TraceTask], models: Iterable[str], folder: TapeFolder, *, jobs: int, seconds: float, software: str
) -> list[str]:
    """Do the work in `jobs` processes and pack what came of it; returns a line for each failure.

    Tracing ends after `seconds`; what is traced by then is packed.
    """
    began, failures = time.time(), []
    total, done = sum(len(unit.models) for unit in work), 0
    # Fresh interpreters: a forked one would inherit whatever threads torch has begun.
    with ProcessPoolExecutor(max(1, jobs), mp_context=get_context("spawn"), initializer=_begin_worker) as pool:
        pending: dict[Future[list[tuple[str, str]]], TraceTask] = {
            pool.submit(trace_unit, unit, folder, began + seconds): unit for unit in work
        }
        for future in as_completed(pending):
            unit = pending[future]
            done += len(unit.models)
            try:
                failed = future.result()
            except BrokenExecutor as error:  # a process was killed, for memory perhaps: what the others made is kept
                failures.append(f"{unit.label}: {error}")
                continue
            failures += [f"{model} {unit.options.key}: {reason}" for model, reason in failed]
            note = f", {len(failed)} cannot be traced" if failed else ""
            print(f"[{done}/{total}] {time.time() - began:4.0f} s  {unit.label}{note}", flush=True)
    with ProcessPoolExecutor(max(1, jobs), mp_context=get_context("spawn")) as pool:
        list(pool.map(pack, *zip(*((model, folder, software) for model in models), strict=True), chunksize=4))
    with contextlib.suppress(OSError):
        os.rmdir(os.path.join(folder.path, ".parts"))
    return failures
