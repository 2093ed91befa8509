"""Regenerates the shipped tapes: ``python -m zeroplan.tapes.ship [--only TEXT] [--missing] [--first N] [--part I/N]``.

Needs torch, transformers and peft. Models of one family differ in widths only, so the first is traced at several points
and the others borrow the forms of its sizes (:class:`zeroplan.trace.api.Donors`).
Models that transformers does not know, or cannot run so, are named. ``--first N`` traces only the N most used variants of
each model, so that a long run begins with what is asked for most; ``--part I/N`` divides the models over processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from zeroplan.core.tape_codec import to_json
from zeroplan.core.tape_options import Arithmetic, Checkpointing, TraceOptions, auto_class_of
from zeroplan.core.workload import Attention
from zeroplan.models import catalog
from zeroplan.tapes import shipped
from zeroplan.trace.api import Donors


def variants() -> Iterator[TraceOptions]:
    """What each model is shipped with, most used first."""
    for checkpointing in (Checkpointing.NONE, Checkpointing.NON_REENTRANT):
        for zero3 in (False, True):
            yield TraceOptions(checkpointing=checkpointing, zero3=zero3)
    for attn in (Attention.SDPA, Attention.EAGER):
        for checkpointing in (Checkpointing.NONE, Checkpointing.NON_REENTRANT):
            if attn is Attention.EAGER:
                yield TraceOptions(attn, checkpointing)
            yield TraceOptions(attn, checkpointing, lora=())
            if attn is Attention.SDPA:
                yield TraceOptions(attn, checkpointing, zero3=True, lora=())
            yield TraceOptions(attn, checkpointing, Arithmetic.AUTOCAST)
            yield TraceOptions(attn, checkpointing, Arithmetic.FP32)


#: Families that come first.
_FIRST = ("llama", "qwen2", "gpt2", "opt", "roberta", "mistral", "qwen3", "gemma2", "phi3", "bert", "t5", "gpt_neox", "mixtral")


def _place(family: str) -> tuple[int, str]:
    return (_FIRST.index(family) if family in _FIRST else len(_FIRST)), family


def main(arguments: list[str] | None = None) -> int:
    """Trace and write; returns the number of models that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="models whose id contains this")
    parser.add_argument("--missing", action="store_true", help="keep variants that are there")
    parser.add_argument("--variants", default="", metavar="TEXT", help="only variants whose key contains this")
    parser.add_argument("--first", type=int, default=0, help="only the N most used variants of each model (0: all)")
    parser.add_argument("--part", default="0/1", help="the i-th of n parts of the models, for several processes")
    options = parser.parse_args(arguments)
    part, parts = (int(x) for x in options.part.split("/"))
    entries = [e for e in catalog.entries() if options.only in e.id]
    entries.sort(key=lambda e: _place(str(e.config["model_type"])))  # neighbours share patterns
    entries = entries[part * len(entries) // parts : (part + 1) * len(entries) // parts]
    wanted = [v for v in list(variants())[: options.first or None] if options.variants in v.key]
    os.makedirs(shipped.DATA, exist_ok=True)
    donors, failed, began = Donors(), 0, time.time()
    for number, entry in enumerate(entries, 1):
        path = shipped.path_of(entry.id)
        kept: dict[str, Any] = {}
        if os.path.exists(path):
            with lzma.open(path, "rt", encoding="utf-8") as stream:
                kept = json.load(stream)
        if not options.missing:
            kept = {key: tape for key, tape in kept.items() if all(key != v.key for v in wanted)}
        problems = _fill(kept, entry, wanted, donors)
        failed += bool(problems)
        if kept:
            _write(path, kept)
        size = os.path.getsize(path) / 1024 if kept else 0
        note = f"  {problems[0]}" if problems else ""
        print(f"[{number}/{len(entries)}] {time.time() - began:5.0f} s  {entry.id}: {len(kept)} tapes, {size:.0f} KiB{note}")
        sys.stdout.flush()
    return failed


def _fill(kept: dict[str, Any], entry: catalog.Entry, wanted: list[TraceOptions], donors: Donors) -> list[str]:
    """Trace what is missing; returns what went wrong."""
    problems = []
    for options in wanted:
        if options.key in kept:
            continue
        try:
            tape = donors.trace(entry.config, auto_class_of(entry.config), options)
        except Exception as error:  # whatever one model's code raises, the others go on
            problems.append(f"{options.key}: {str(error).splitlines()[0][:160] if str(error) else type(error).__name__}")
            continue
        kept[options.key] = to_json(tape)
    return problems


def _write(path: str, kept: dict[str, Any]) -> None:
    temporary = path + ".part"
    with lzma.open(temporary, "wt", encoding="utf-8", preset=6) as stream:
        json.dump(kept, stream, separators=(",", ":"))
    os.replace(temporary, path)
    with contextlib.suppress(OSError):
        os.unlink(temporary)


if __name__ == "__main__":
    raise SystemExit(1 if main() else 0)
