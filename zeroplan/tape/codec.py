"""Tapes as JSON: plain lists and numbers, so that the standard library reads them."""

from __future__ import annotations

from typing import Any

from zeroplan.tape.expanded import TapeModule, TapeParam
from zeroplan.tape.format import FORMAT, Anchor, Piece, Segment, Size, Stack, Tape, TapeProgram

_COLUMNS = ("op", "anchor", "offset", "aux_anchor", "aux", "kind")


def to_json(tape: Tape) -> dict[str, Any]:
    """The tape as an object that ``json.dumps`` takes; equal segments are stored once."""
    segments: dict[str, int] = {}
    stored: list[list[list[int]]] = []

    def segment(item: Segment) -> int:
        columns = [getattr(item, name) for name in _COLUMNS]
        key = repr(columns)
        if key not in segments:
            segments[key] = len(stored)
            stored.append(columns)
        return segments[key]

    programs = [
        {
            "batches": p.batches,
            "seqs": p.seqs,
            "sizes": [[s.function, s.args] for s in p.sizes],
            "anchors": [list(a) for a in p.anchors],
            "pieces": [[piece.stack, int(piece.reverse), [segment(s) for s in piece.segments]] for piece in p.pieces],
        }
        for p in tape.programs
    ]
    return {
        "format": FORMAT,
        "modules": [_module(m) for m in tape.modules],
        "params": [_param(p) for p in tape.params],
        "order": tape.order,
        "param_order": tape.param_order,
        "stacks": [
            {
                "name": s.name,
                "parent": s.parent,
                "plan": s.plan,
                "modules": _once([[_module(m) for m in block] for block in s.modules]),
                "params": _once([[_param(p) for p in block] for block in s.params]),
            }
            for s in tape.stacks
        ],
        "programs": programs,
        "segments": stored,
        "about": tape.about,
        **({"held": tape.held} if tape.held else {}),
    }


def from_json(data: dict[str, Any]) -> Tape:
    """Load the tape that :func:`to_json` stored. Raises ValueError: when it is of another format."""
    if data.get("format") != FORMAT:
        raise ValueError(f"expected tape format {FORMAT} but got {data.get('format')!r}")
    segments = [Segment(*columns) for columns in data["segments"]]
    return Tape(
        modules=[_to_module(m) for m in data["modules"]],
        params=[_to_param(p) for p in data["params"]],
        order=data["order"],
        param_order=data["param_order"],
        stacks=[
            Stack(
                s["name"],
                s["parent"],
                s["plan"],
                [[_to_module(m) for m in block] for block in _each(s["modules"])],
                [[_to_param(p) for p in block] for block in _each(s["params"])],
            )
            for s in data["stacks"]
        ],
        programs=[
            TapeProgram(
                (p["batches"][0], p["batches"][1]),
                (p["seqs"][0], p["seqs"][1]),
                [Size(f, tuple(tuple(tuple(t) for t in poly) for poly in args)) for f, args in p["sizes"]],
                [Anchor(*a) for a in p["anchors"]],
                [Piece(stack, bool(reverse), [segments[i] for i in items]) for stack, reverse, items in p["pieces"]],
            )
            for p in data["programs"]
        ],
        held=list(data.get("held", [])),
        about=data["about"],
    )


def _once(blocks: list[Any]) -> dict[str, Any]:
    kept: list[Any] = []
    index = []
    for block in blocks:
        if block not in kept:
            kept.append(block)
        index.append(kept.index(block))
    return {"index": index, "kept": kept}


def _each(stored: dict[str, Any]) -> list[Any]:
    return [stored["kept"][i] for i in stored["index"]]


def _module(m: TapeModule) -> list[Any]:
    return [m.name, m.type, m.parent, list(m.params)]


def _to_module(m: list[Any]) -> TapeModule:
    return TapeModule(m[0], m[1], m[2], tuple(m[3]))


def _param(p: TapeParam) -> list[Any]:
    return [p.name, list(p.shape), int(p.trainable), p.itemsize]


def _to_param(p: list[Any]) -> TapeParam:
    return TapeParam(p[0], tuple(p[1]), bool(p[2]), p[3])
