"""Traces a model: a few blocks at a few points, folded and fitted into a :class:`~zeroplan.core.tape_format.Tape`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan.core.tape_format import Program, Tape
from zeroplan.core.tape_options import TraceOptions
from zeroplan.trace.assemble import Assembler, Blocks, find_blocks
from zeroplan.trace.build import build_inputs, build_model, depths_of, full_config, shorten
from zeroplan.trace.fit import DoesNotFitError, Point
from zeroplan.trace.fold import DoesNotFoldError, UnlikeError
from zeroplan.trace.recorder import Recording
from zeroplan.trace.run import record

#: Sequence lengths to trace at: alike modulo nothing, so that padding shows; the last checks the others.
_SEQS = (192, 320, 448)
_RANKS = (6, 10)
_ANY = (1, 0)


def trace_model(config: Mapping[str, Any], auto_class: str, options: TraceOptions | None = None) -> Tape:
    """The tape of a transformers model that a config describes, at its full depth, for any micro batch and sequence length.

    Args:
        config: the contents of a ``config.json``; ``model_type`` is required.
        auto_class: the transformers auto class, such as ``"AutoModelForCausalLM"``.
        options: how it runs; sdpa, 16 bits and no checkpointing by default.

    Raises:
        BadInput: when transformers does not know the model or it cannot run on the meta device.
    """
    options = options or TraceOptions()
    whole = full_config(config)
    problem: Exception | None = None
    for extra in (0, 2, None):
        depths = depths_of(whole, extra=extra or 0)
        if extra is None:
            depths = [replace(d, traced=d.real) for d in depths]
        try:
            return _trace(shorten(whole, depths), [(d.traced, d.real) for d in depths], auto_class, options)
        except DoesNotFoldError as error:
            problem = error
    raise BadInput(f"cannot be traced: {problem}", where=str(config.get("model_type")))


def _trace(config: dict[str, Any], depths: list[tuple[int, int]], auto_class: str, options: TraceOptions) -> Tape:
    ranks = _RANKS if options.lora is not None else (0,)
    models = [build_model(config, auto_class, options, rank) for rank in ranks]
    shapes = _shapes(models)

    def run(point: Point) -> Recording:
        model = models[ranks.index(point.rank)]
        return record(model, lambda: build_inputs(config, auto_class, options, point), options)

    vocab = _vocabulary(config)
    assembler = Assembler(models[0], find_blocks(models[0], depths), options, vocab)
    programs = trace_points(assembler, run, ranks, _SEQS)
    return assembler.tape(programs, shapes)


def trace_points(
    assembler: Assembler, run: Callable[[Point], Recording], ranks: Sequence[int], seqs: Sequence[int]
) -> list[Program]:
    """One program for all micro batches, or one for a micro batch of one and one for more, where they differ."""
    first = ranks[0]
    lengths = [Point(1, s, first) for s in seqs]
    wider = [Point(2, seqs[0], first), Point(3, seqs[1], first)]
    ranked = [Point(2, seqs[0], r) for r in ranks[1:]]
    points = [*lengths, *wider, *ranked]
    traces = [run(p) for p in points]
    try:
        return [assembler.program(points, traces, _ANY, _ANY)]
    except (UnlikeError, DoesNotFitError):
        pass
    single = [Point(1, seqs[0], r) for r in ranks[1:]]
    alone = assembler.program([*lengths, *single], [*traces[:3], *map(run, single)], (1, 1), _ANY)
    more = [*wider, Point(2, seqs[2], first), Point(4, seqs[0], first), *ranked]
    known = traces[3:5] + [run(p) for p in more[2:4]] + traces[5:]
    return [alone, assembler.program(more, known, (2, 0), _ANY)]


def _vocabulary(config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, Mapping) else 0)
    return int(size or 0)


def _shapes(models: Sequence[nn.Module]) -> list[tuple[int, ...]]:
    """Shapes of the parameters, with -1 where they follow the LoRA rank."""
    each = [[tuple(p.shape) for p in model.parameters()] for model in models]
    if len(each) == 1:
        return each[0]
    return [
        tuple(-1 if a != b else a for a, b in zip(one, two, strict=True)) for one, two in zip(each[0], each[1], strict=True)
    ]
