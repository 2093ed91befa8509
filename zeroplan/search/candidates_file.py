"""Candidates that a user hands in: JSON lines of ``{"ds_config": {…}, "gradient_checkpointing": bool}``."""

from __future__ import annotations

from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.plumbing.documents import parse_json, text_of
from zeroplan.core.plumbing.files import read_bytes
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.planner.from_ds_config import read_run
from zeroplan.run.ask import Ask
from zeroplan.search.search_options import ResolvedSearch
from zeroplan.search.space import Candidate
from zeroplan.simulate.allocator.config import AllocatorConfig

_KEYS = ("ds_config", "gradient_checkpointing", "alloc_conf")
_MOST_BYTES = 16 << 20
_MOST_LINES = 100_000
#: Keys of a ds_config by which ranks share the model.
SHARED_KEYS = ("tensor_parallel", "sequence_parallel_size", "expert_parallel")
_SHARED = "such layouts are planned by estimate and explain alone; data parallelism is counted"


def read_candidates(path: str, resolved: ResolvedSearch, request: Ask) -> list[Candidate]:
    """Read the candidates of a file, `index` counted from 0 over its non-empty lines.

    Raises:
        BadInput: an unreadable file, a line that is no such object, or a ds_config that DeepSpeed refuses.
    """
    found: list[Candidate] = []
    for number, line in _lines(path):
        where = f"{path}:{number}"
        entry = _entry(line, where)
        found.append(_candidate(entry, resolved, request, where, len(found)))
    if not found:
        raise BadInput("holds no candidate", where=path, remedy='write lines of {"ds_config": {…}}')
    return found


def _lines(path: str) -> list[tuple[int, str]]:
    text = text_of(read_bytes(path, _MOST_BYTES, remedy="give a file of JSON lines"), path)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) > _MOST_LINES:
        raise BadInput(f"holds more than {_MOST_LINES:,} candidates", where=path)
    return lines


def _entry(line: str, where: str) -> dict[str, Any]:
    entry = parse_json(line, where)
    if not isinstance(entry, dict) or not isinstance(entry.get("ds_config"), dict):
        raise BadInput("is no object with a ds_config", where=where, remedy='write {"ds_config": {…}}')
    for key in entry:
        if key not in _KEYS:
            raise BadInput(
                f"unknown key {key[:60]!r}", where=where, remedy=did_you_mean(key, _KEYS) or f"use {', '.join(_KEYS)}"
            )
    if not isinstance(entry.get("gradient_checkpointing", False), bool):
        raise BadInput("gradient_checkpointing is neither true nor false", where=where, remedy="write true or false")
    conf = entry.get("alloc_conf", "")
    if not isinstance(conf, str):
        raise BadInput("alloc_conf is no string", where=where, remedy='write "expandable_segments:True", for one')
    AllocatorConfig.parse(conf, where=f"{where}: alloc_conf")
    return entry


def _candidate(entry: dict[str, Any], resolved: ResolvedSearch, request: Ask, where: str, index: int) -> Candidate:
    try:
        return candidate_of(
            entry["ds_config"], resolved, request, entry.get("gradient_checkpointing"), index, entry.get("alloc_conf", "")
        )
    except BadInput as error:
        raise BadInput(error.what, where=f"{where}: {error.where}" if error.where else where, remedy=error.remedy) from None


def candidate_of(
    ds_config: dict[str, Any] | str,
    resolved: ResolvedSearch,
    request: Ask,
    gradient_checkpointing: bool | None,
    index: int = 0,
    alloc_conf: str = "",
) -> Candidate:
    """Make a candidate of one ds_config; flags fill what it leaves open, and its warnings join the search's.

    Raises:
        BadInput: what DeepSpeed refuses, or a flag that contradicts it.
    """
    again = request.value("gradient_checkpointing") if gradient_checkpointing is None else gradient_checkpointing
    asked = request.replace(ds_config=ds_config, gradient_checkpointing=again)
    run = read_run(asked, resolved.engine, resolved.cluster, resolved.spec)
    resolved.warnings.extend(f"candidate {index}: {text}" for text in run.warnings)
    own = None if run.engine is resolved.engine else run.engine
    shares = (run.tp > 1, run.ulysses > 1, run.auto_ep)
    keys = [key for key, one in zip(SHARED_KEYS, shares, strict=True) if one]
    shared = tuple(Unmodelled(key, Effect.UNKNOWN, _SHARED) for key in keys)
    unmodelled = (*resolved.unmodelled, *run.unmodelled, *shared)
    return Candidate(run.zero, run.workload, alloc_conf or request.alloc_conf, index=index, engine=own, unmodelled=unmodelled)
