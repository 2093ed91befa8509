"""Batch arithmetic: ``train_batch_size = micro × accumulation × ranks``, as runtime/config.py resolves it."""

from __future__ import annotations

from typing import Any

from zeroplan.ds_config.findings import Severity
from zeroplan.ds_config.reading import Reading

TRAIN, MICRO, ACCUM = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_SOURCE = "runtime/config.py"

Batch = tuple[int | None, int | None, int | None]


def resolve_batch(reading: Reading, world_size: int | None) -> Batch:
    """Return (micro batch, accumulation, whole batch), each None where open; note findings for sizes that cannot be.

    `world_size` None leaves the number of ranks open: then only what holds on every number of ranks is an error. DeepSpeed
    needs one of micro and whole batch, and the HF Trainer fills a size at ``auto``; for zeroplan's runtime a size at ``auto``
    is one that is not given, and a micro batch that nothing fixes is 1.
    """
    train, micro, accum = (_size(reading, name) for name in (TRAIN, MICRO, ACCUM))
    broken = any(finding.where in (TRAIN, MICRO, ACCUM) and finding.severity is Severity.ERROR for finding in reading.findings)
    if broken:
        return micro, accum, train
    open_accum = ACCUM in reading.autos and not reading.for_runtime
    if train is None and micro is None and reading.for_runtime:
        micro = 1
    if train is None and micro is None:
        if TRAIN not in reading.autos and MICRO not in reading.autos:
            what = f"neither {TRAIN} nor {MICRO} is set: DeepSpeed alone refuses, Lightning and a flag fill it"
            reading.add("batch.missing", Severity.OPEN, MICRO, what, "set one of the two", _SOURCE)
        return None, accum, None
    if open_accum and accum is None:
        return micro, None, train
    if world_size is None:
        return _any_world(reading, train, micro, accum)
    return _known_world(reading, train, micro, accum, world_size)


def _size(reading: Reading, name: str) -> int | None:
    value: Any = reading.values.get(name)
    if value is None:
        return None
    if value <= 0:
        reading.add("batch.positive", Severity.ERROR, name, f"{value} is not above zero", "use 1 or more", _SOURCE)
        return None
    return int(value)


def _known_world(reading: Reading, train: int | None, micro: int | None, accum: int | None, world: int) -> Batch:
    given = (train, micro, accum)
    if train is None:
        accum = accum or 1
        return micro, accum, (micro or 1) * accum * world
    if micro is None:
        micro = train // world // (accum or 1)
        accum = accum or 1
    elif accum is None:
        accum = train // micro // world
    if micro * accum * world != train or not micro or not accum:
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        if given[1] and given[2]:
            what = f"{train} is not {micro} × {accum} × {ranks} = {micro * accum * world}"
            remedy = f"set {TRAIN} to {micro * accum * world}, or leave it out"
        else:
            part, name = (given[1], "micro batch") if given[1] else (given[2] or 1, "accumulation")
            what = f"{train} does not divide by {name} {part} × {ranks}"
            remedy = f"use a multiple of {part * world}"
        reading.add("batch.arithmetic", Severity.ERROR, TRAIN, what, remedy, _SOURCE)
    return micro, accum, train


def _any_world(reading: Reading, train: int | None, micro: int | None, accum: int | None) -> Batch:
    if train is None:
        return micro, accum or 1, None
    factor = (micro or 1) * (accum or 1)
    if train % factor:
        said = " × ".join(str(n) for n in (micro, accum) if n)
        what = f"{train} is not a multiple of {said}, so no number of ranks fits"
        reading.add("batch.arithmetic", Severity.ERROR, TRAIN, what, f"use a multiple of {factor}", _SOURCE)
        return micro, accum, train
    left = train // factor
    names = [name for name, n in (("micro batch", micro), ("accumulation", accum)) if n is None]
    if micro is None and accum is None:
        names = ["micro batch"]  # DeepSpeed then takes an accumulation of 1
        accum = 1
    sizes = " × ".join([*(str(n) for n in (micro, accum) if n and n != 1), *names, "ranks"])
    if micro and accum:
        what = f"{train} = {micro} × {accum} × ranks: runs on exactly {left} rank{'s' if left != 1 else ''}"
        reading.add("batch.ranks", Severity.NOTE, TRAIN, what, "", _SOURCE)
        return micro, accum, train
    what = f"{train} = {sizes}, so {' × '.join([*names, 'ranks'])} = {left}"
    reading.add("batch.ranks", Severity.NOTE, TRAIN, what, f"the number of ranks must divide {left}", _SOURCE)
    if left == 1:  # only one rank, and nothing to choose
        micro, accum = micro or 1, accum or 1
    return micro, accum, train
