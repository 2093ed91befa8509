"""Makes the shipped tapes, and says what state they are in.

``python -m zeroplan.tapes.ship`` traces every catalog model under every variant anew, ``--missing`` only what is not there,
``--again TEXT`` also what failed for a reason that contains this. ``--status`` says what a folder holds and exits 1 unless it
is complete; ``--compare DIR`` says which tapes of another folder differ. Tracing needs torch, transformers and peft, and no
GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence

from zeroplan.models import catalog
from zeroplan.tape.codec import from_json
from zeroplan.tape.expanded import ExpandedTape
from zeroplan.tapes import shipped
from zeroplan.tapes.cache import versions
from zeroplan.tapes.regenerate import TapeFolder, Wanted, run, units
from zeroplan.tapes.variants import further_variants, variants_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where tapes are missing (``--status``) or differ (``--compare``), else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--into", default=shipped.DATA, metavar="DIR", help="the folder of tapes (the package's own)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (all cores)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no tape after this time")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose id contains this")
    parser.add_argument("--variants", default="", metavar="TEXT", help="variants whose key contains this")
    parser.add_argument("--missing", action="store_true", help="keep the tapes, and the known failures, that are there")
    parser.add_argument("--again", metavar="TEXT", help="--missing, and known failures whose reason contains this")
    parser.add_argument("--status", action="store_true", help="trace nothing: say what is there")
    parser.add_argument("--compare", metavar="DIR", help="trace nothing: say how another folder's tapes differ")
    options = parser.parse_args(arguments)
    entries = [e for e in catalog.entries() if options.only in e.id]
    wanted = {e.id: [v for v in variants_of(e.id) if options.variants in v.key] for e in entries}
    if options.status:
        return status(entries, wanted, options.into)
    wanted = {
        model: [*own, *(v for v in further_variants(model) if options.variants in v.key)] for model, own in wanted.items()
    }
    if options.compare:
        return compare(entries, wanted, options.into, options.compare)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when the processes import torch: a trace is the same with and without
    os.makedirs(options.into, exist_ok=True)
    folder = TapeFolder(options.into)
    missing = options.missing or options.again is not None
    if not missing:
        shutil.rmtree(os.path.join(options.into, ".parts"), ignore_errors=True)
    done = {e.id: folder.done(e.id, again=options.again) if missing else set() for e in entries}
    work = units(entries, wanted, lambda model, key: key not in done[model])
    software = ", ".join(versions())
    failures = run(work, [e.id for e in entries], folder, jobs=options.jobs, seconds=options.seconds, software=software)
    for line in failures:
        print(line)
    shipped.share_equal([entry.id for entry in catalog.entries()], options.into)
    return 0


def status(entries: Sequence[catalog.Entry], wanted: Wanted, folder: str) -> int:
    """Print what a folder holds; 1 where a tape is missing that is not known to fail."""
    missing: list[str] = []
    failed: dict[str, list[str]] = defaultdict(list)
    software: Counter[str] = Counter()
    count = size = 0
    for entry in entries:
        path = shipped.file_of(entry.id, folder)
        content = shipped.read_file(path)
        size += os.path.getsize(path) if content else 0
        for options in wanted[entry.id]:
            if options.key in content:
                count += 1
                software[content.get(shipped.SOFTWARE, {}).get(options.key, "unknown versions")] += 1
            elif options.key in content.get(shipped.FAILED, {}):
                failed[content[shipped.FAILED][options.key]].append(f"{entry.id} {options.key}")
            else:
                missing.append(f"{entry.id} {options.key}")
    for reason, names in sorted(failed.items()):
        print(f"{len(names)} cannot be traced ({names[0]}{', …' if len(names) > 1 else ''}): {reason}")
    for name in missing[:20]:
        print(f"missing: {name}")
    for versions_, number in software.most_common():
        print(f"{number} tapes by {versions_}")
    known = sum(map(len, failed.values()))
    whole = sum(len(wanted[entry.id]) for entry in entries)
    print(f"{count} of {whole} tapes, {known} known to fail, {len(missing)} missing; {size / 2**20:.1f} MiB")
    return 1 if missing else 0


def compare(entries: Sequence[catalog.Entry], wanted: Wanted, folder: str, other: str) -> int:
    """Print which tapes that both folders hold differ in their events; 1 if any does."""
    same, differ = 0, []
    for entry in entries:
        one, two = (shipped.read_file(shipped.file_of(entry.id, path)) for path in (folder, other))
        for key in (v.key for v in wanted[entry.id] if v.key in one and v.key in two):
            note = "" if one[key] == two[key] else _difference(one[key], two[key])
            same += not note
            if note:
                differ.append(f"{entry.id} {key}: {note}")
    for line in differ:
        print(line)
    print(f"{same} tapes are the same, {len(differ)} differ")
    return 1 if differ else 0


def _difference(one: dict[str, object], two: dict[str, object]) -> str:
    """Say where two stored tapes first differ when expanded; empty if nowhere."""
    for batch, seq in ((1, 384), (4, 1000)):
        first, second = (from_json(tape).expand(batch, seq, 8) for tape in (one, two))
        if _columns(first) == _columns(second):
            continue
        for i, (a, b) in enumerate(zip(_columns(first), _columns(second), strict=False)):
            if a != b:
                module = first.modules[first.module[i]].name if first.module[i] >= 0 else "-"
                return f"event {i} in {module}, micro batch {batch}, {seq} tokens: {a} and {b}"
        return f"{len(first)} and {len(second)} events"
    return ""


def _columns(tape: ExpandedTape) -> list[tuple[int, int, int]]:
    return list(zip(tape.op, tape.arg, tape.aux, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
