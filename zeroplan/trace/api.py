"""Traces a model: runs a few of its blocks at a few points, and makes a :class:`~zeroplan.tape.format.Tape` of it.

Note [Ranges]
    What a model allocates may change with the micro batch (a broadcast over one row makes no copy) and with the sequence
    length (a sliding window needs a mask once the sequence is longer). So a tape holds one program for each range of micro
    batches and sequence lengths within which the events are the same.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import HEADLESS
from zeroplan.tape.expanded import ExpandedTape, Op
from zeroplan.tape.format import Size, Tape, TapeProgram
from zeroplan.tape.options import TraceOptions
from zeroplan.trace.assemble import Assembler, find_blocks
from zeroplan.trace.build import Depth, build_inputs, build_model, depths_of, full_config, shorten, thresholds, vocabulary_of
from zeroplan.trace.fit import DoesNotFitError, SizeForm, TracePoint, fit_size, form_of
from zeroplan.trace.fold import DoesNotFoldError, UnlikeError
from zeroplan.trace.media import Medium, media_of
from zeroplan.trace.ranks import ALONE, Ranks
from zeroplan.trace.recorder import Recording
from zeroplan.trace.run import record
from zeroplan.trace.tiled import MOST_TRACED

#: Offsets of the traced sequence lengths from the begin of a range. They are no multiples of 128, so that padding shows.
_STEPS = (192, 320, 448)
#: Elements that rows of an attention mask are padded to.
_MASK_ROW = 8
_RANKS = (6, 10)
_ANY = (1, 0)


@dataclass(slots=True)
class Pattern:
    """The events that the models of one family share in one range of numbers, and the form of each storage's size.

    Attributes:
        batches: the range of micro batches.
        piece: the index of the range of sequence lengths.
        events: the columns of the traced events.
        program: the program made of them.
        size_of: for each storage, the index of its size in the program.
        forms: for each storage, the form of its size.
    """

    batches: tuple[int, int]
    piece: int
    events: tuple[list[int], list[int], list[int]]
    program: TapeProgram
    size_of: list[int]
    forms: list[SizeForm]

    def with_sizes(
        self, seqs: tuple[int, int], points: Sequence[TracePoint], traces: Sequence[Recording]
    ) -> TapeProgram | None:
        """The program with another model's sizes; None where storages that had one size here differ there."""
        sizes: dict[int, Size] = {}
        fitted: dict[object, Size] = {}
        for ident, (index, form) in enumerate(zip(self.size_of, self.forms, strict=True)):
            values = tuple(t.allocs[ident].size for t in traces)
            if (values, form) not in fitted:
                fitted[values, form] = fit_size(points, values, form)
            if sizes.setdefault(index, fitted[values, form]) != fitted[values, form]:
                return None
        own = [sizes[i] for i in range(len(self.program.sizes))]
        return TapeProgram(self.batches, seqs, own, self.program.anchors, self.program.pieces)


@dataclass(slots=True)
class Donor:
    """A traced model whose patterns other models of its family may have, too.

    Attributes:
        attempt: the number of the attempt that succeeded; see :func:`_attempts`.
        cuts: the indices of the thresholds at which the events change.
        patterns: its patterns.
        shapes: the shapes of its parameters.
    """

    attempt: int
    cuts: list[int]
    patterns: list[Pattern]
    shapes: list[tuple[int, ...]]


@dataclass(slots=True)
class Donors:
    """Traces many models, and each pattern of a family once. Arguments and errors are those of :func:`trace_model`."""

    _known: dict[tuple[str, str, str], list[Donor]] = field(default_factory=dict)

    def trace(self, config: Mapping[str, Any], auto_class: str, options: TraceOptions) -> Tape:
        """The model's tape. Where its events are those of a model traced before, few points are traced."""
        with _ranks_of(options) as ranks:
            return self._trace(config, auto_class, options, ranks)

    def _trace(self, config: Mapping[str, Any], auto_class: str, options: TraceOptions, ranks: Ranks) -> Tape:
        key = (str(config.get("model_type")), auto_class, options.key)
        known = self._known.setdefault(key, [])
        for number, attempt in enumerate(_attempts(config, auto_class, options, ranks)):
            for donor in known:
                if donor.attempt != number:
                    continue
                try:
                    return attempt.like(donor)
                except (UnlikeError, DoesNotFitError, DoesNotFoldError):
                    continue
            if known and all(donor.attempt > number for donor in known):
                continue  # the family needs more blocks
            try:
                tape, donor = attempt.whole()
            except DoesNotFoldError:
                continue
            donor.attempt = number
            known.append(donor)
            return tape
        raise _no_period(config)


def trace_at(config: Mapping[str, Any], auto_class: str, options: TraceOptions, point: TracePoint) -> Tape:
    """Trace the tape for one micro batch, sequence length and LoRA rank, for a model whose sizes follow no expressions."""
    with _ranks_of(options) as ranks:
        for attempt in _attempts(config, auto_class, options, ranks, point.rank or None):
            try:
                return attempt.at(point)
            except DoesNotFoldError:
                continue
    raise _no_period(config)


def traced(
    config: Mapping[str, Any], auto_class: str, options: TraceOptions, batch: int, seq: int | None, rank: int | None
) -> Tape:
    """Trace the tape for any numbers, or, for a model whose sizes follow no expressions, for these numbers alone."""
    try:
        many = max(options.tiles.mlp, options.tiles.loss) > MOST_TRACED or options.grouped is not None
        if not options.media and options.at is None and not many:  # placeholders need a length of their own
            return trace_model(config, auto_class, options)
    except (UnlikeError, DoesNotFitError):
        pass
    return trace_at(config, auto_class, options, TracePoint(batch, seq or 1, rank or 0))


def trace_model(config: Mapping[str, Any], auto_class: str, options: TraceOptions | None = None) -> Tape:
    """Trace the transformers model that a config describes, for any micro batch and sequence length.

    Args:
        config: the contents of a ``config.json``; ``model_type`` is required.
        auto_class: the transformers auto class, such as ``"AutoModelForCausalLM"``.
        options: how the model runs; None for sdpa, 16 bits and no checkpointing.

    Raises:
        BadInput: when transformers does not know the model.
        UnlikeError, DoesNotFitError: when sizes follow no short expressions; see :func:`trace_at`.
    """
    options = options or TraceOptions()
    with _ranks_of(options) as ranks:
        for attempt in _attempts(config, auto_class, options, ranks):
            try:
                return attempt.whole()[0]
            except DoesNotFoldError:
                continue
    raise _no_period(config)


def trace_module(
    module: nn.Module, inputs: Callable[[], Mapping[str, Any]], options: TraceOptions | None = None, *, vocab: int = 0
) -> Tape:
    """The tape of any module for one example batch. It expands to that batch, whatever numbers are asked for.

    Args:
        module: the module. It is moved to the meta device, where it loses its weights.
        inputs: returns the keyword arguments of its forward, on the meta device. The forward returns the loss, or an object
            with an attribute `loss`; of any other tensor the mean is taken.
        options: only `arithmetic` AUTOCAST and `zero3` apply.
        vocab: the size of the vocabulary, which tells logits.
    """
    options = options or TraceOptions()
    module = module.to("meta")
    point = TracePoint(1, 1)
    assembler = Assembler(module, [], options, vocab)
    program, _ = assembler.program([point], [record(module, inputs, options)], _ANY, _ANY)
    return assembler.tape([program], [tuple(p.shape) for p in module.parameters()])


def _no_period(config: Mapping[str, Any]) -> BadInput:
    return BadInput("its blocks show no order that can be traced", where=str(config.get("model_type")))


@contextlib.contextmanager
def _ranks_of(options: TraceOptions) -> Iterator[Ranks]:
    """Make the ranks that the options ask for, as long as the context lasts."""
    if options.mesh.ulysses > 1:
        from zeroplan.trace.ulysses import UlyssesRank

        yield UlyssesRank(options.mesh.ulysses)
        return
    if options.mesh.auto_ep:
        from zeroplan.trace.auto_ep import AutoEpRank

        yield AutoEpRank(options.mesh.ep)
        return
    if options.mesh.tp == options.mesh.cp == options.mesh.ep == 1:
        yield ALONE
        return
    if options.mesh.whole_vocabulary:
        from zeroplan.trace.auto_tp import AutoTpRank

        yield AutoTpRank(options.mesh.tp)
        return
    from zeroplan.trace.mesh import MeshRank, fake_mesh

    with fake_mesh(options.mesh.ep, options.mesh.cp, options.mesh.tp) as mesh:
        yield MeshRank(mesh, sequence=options.mesh.sp, across=options.mesh.across)


def _attempts(
    config: Mapping[str, Any], auto_class: str, options: TraceOptions, ranks: Ranks, rank: int | None = None
) -> Iterator[_Attempt]:
    """Yield the attempts in order: with few blocks, with two periods more, with all blocks, and without folding them.

    The last is for stacks that run in part, as LLaVA's vision tower, whose last block nobody asks, or blocks whose backward
    does not run, since they are frozen and so is all before them.
    """
    whole = full_config(config)
    lora = (rank,) if rank else _RANKS
    if options.grouped is not None:  # blocks run in another order than one after another
        yield _Attempt(whole, [], auto_class, options, lora, ranks)
        return
    ends = sum(options.ends)
    for extra in () if options.by_block else (0, 2):
        depths = depths_of(whole, extra=extra, every=options.every, ends=ends)
        deeper = depths_of(whole, extra=extra + 1, every=options.every, ends=ends)
        yield _Attempt(whole, depths, auto_class, options, lora, ranks, deeper=deeper)
    real = [Depth(d.path, d.real, d.real) for d in depths_of(whole)]
    for folded in (True, False):
        yield _Attempt(whole, real, auto_class, options, lora, ranks, folded=folded)


class _Attempt:
    """One model with a certain number of blocks; `deeper` are those of a model that checks what they tell of others."""

    def __init__(
        self,
        whole: dict[str, Any],
        depths: Sequence[Depth],
        auto_class: str,
        options: TraceOptions,
        lora: tuple[int, ...],
        on: Ranks,
        deeper: Sequence[Depth] = (),
        folded: bool = True,
    ) -> None:
        config = shorten(whole, depths) if any(d.traced != d.real for d in depths) else whole
        self._whole, self._depths, self._deeper = whole, depths, deeper
        self._config, self._auto_class, self._options = config, auto_class, options
        self._ranks = lora if options.lora is not None else (0,)
        self._on = on
        self._models: dict[int, nn.Module] = {}
        self._media: tuple[Medium, ...] = ()
        self._traces: dict[TracePoint, Recording] = {}
        model = self._model(self._ranks[0])
        blocks = find_blocks(model, [(d.traced, d.real) for d in depths])
        self._assembler = Assembler(model, blocks, options, vocabulary_of(config), folded=folded)
        self._extends = False
        self._thresholds = thresholds(config)
        if self._thresholds and options.split_tokens > 1:
            where = "--cp" if options.mesh.cp > 1 else "--ulysses" if options.mesh.ulysses > 1 else "--sp"
            raise BadInput("splitting the tokens of a model with windows is not modelled", where=where, remedy="leave it out")

    def _model(self, rank: int) -> nn.Module:
        if rank not in self._models:
            model = build_model(self._config, self._auto_class, self._options, rank)
            self._on.lay_out(model)
            self._models[rank] = model
        return self._models[rank]

    def _run(self, point: TracePoint) -> Recording:
        if point not in self._traces:
            whole = point._replace(seq=point.seq * self._options.split_tokens)

            def inputs() -> dict[str, Any]:
                return self._on.inputs(build_inputs(self._config, self._auto_class, self._options, whole, media))

            model, headless = self._model(point.rank), self._auto_class in HEADLESS
            media = self._media_of(model)
            self._traces[point] = record(model, inputs, self._options, self._on, needs_loss=not headless)
        return self._traces[point]

    def _media_of(self, model: nn.Module) -> tuple[Medium, ...]:
        """How the model takes what comes beside text, if the options have any; derived once."""
        if self._options.media and not self._media:
            self._media = media_of(model, self._config, self._options.media)
        return self._media

    # ---- ranges of sequence lengths ------------------------------------------------------------------------------------
    def _cuts(self) -> list[int]:
        """Return the indices of the thresholds at which the events change."""
        found = []
        for i, at in enumerate(self._thresholds):
            below, above = _sides(at, self._thresholds)
            if below and len(_distinct(self._run(TracePoint(1, seq, self._ranks[0])) for seq in (below, above))) > 1:
                found.append(i)
        return found

    def _pieces(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        ends = sorted({self._thresholds[i] for i in cuts})
        return list(zip([1, *ends], [*(e - 1 for e in ends), 0], strict=True))

    # ---- tracing -------------------------------------------------------------------------------------------------------
    def whole(self) -> tuple[Tape, Donor]:
        """Trace the tape at every point that the sizes' forms need and at others that check them.

        Raises:
            DoesNotFoldError: when the traced blocks show no period.
        """
        self.at(TracePoint(1, _STEPS[0], self._ranks[0]))  # where the blocks show no period, one point tells
        cuts = self._cuts()
        programs: list[TapeProgram] = []
        patterns: list[Pattern] = []
        for piece, seqs in enumerate(self._pieces(cuts)):
            for batches, points in self._groups(_lengths(seqs)):
                traces = [self._run(p) for p in points]
                program, size_of = self._assembler.program(points, traces, batches, seqs)
                programs.append(program)
                forms = [form_of(program.sizes[i]) for i in size_of]
                patterns.append(Pattern(batches, piece, _events(traces[0]), program, size_of, forms))
        shapes = self._shapes()
        tape = self._balanced(self._assembler.tape(programs, shapes), points[-1])
        return tape, Donor(0, cuts, patterns, shapes)

    def _balanced(self, tape: Tape, point: TracePoint) -> Tape:
        """Return the tape, if at its whole depth it frees all that the traced blocks free.

        Raises:
            DoesNotFoldError: when blocks that were not traced leave storages behind.
        """
        left = _left_behind(self._run(point))
        whole = tape.expand(point.batch, point.seq, point.rank or None)
        if _left_behind(whole) > left:
            raise DoesNotFoldError("blocks that were not traced free less than those that were")
        self._tells_deeper(point)
        return tape

    def _tells_deeper(self, point: TracePoint) -> None:
        """Trace a model with another number of blocks, and compare it with what the traced blocks tell of it.

        Numbers of blocks that repeat no module of a list, as ALBERT's, which calls one layer again and again, or something
        beside such a list, show here and nowhere else.

        Raises:
            DoesNotFoldError: when it allocates something else.
        """
        pairs = [(one.traced, other.traced) for one, other in zip(self._depths, self._deeper, strict=False)]
        if self._extends or all(shallow == deep for shallow, deep in pairs):
            return
        config = shorten(self._whole, self._deeper)
        own = [Depth(d.path, d.traced, d.traced) for d in self._deeper]
        deeper = _Attempt(config, own, self._auto_class, self._options, self._ranks, self._on)
        blocks = find_blocks(self._model(point.rank or self._ranks[0]), pairs)
        assembler = Assembler(self._model(point.rank or self._ranks[0]), blocks, self._options, vocabulary_of(config))
        program, _ = assembler.program([point], [self._run(point)], _ANY, _ANY)
        told = assembler.tape([program], self._shapes())
        if _events_of(told, point) != _events_of(deeper.at(point), point):
            raise DoesNotFoldError("a model with other blocks than those that were traced allocates something else")
        self._extends = True

    def _groups(self, seqs: tuple[int, int, int]) -> list[tuple[tuple[int, int], list[TracePoint]]]:
        """Ranges of micro batches with the points to trace: one range where all points fit together, else 1 and above."""
        first, *others = self._ranks
        lengths = [TracePoint(1, s, first) for s in seqs]
        wider = [TracePoint(2, seqs[0], first), TracePoint(3, seqs[1], first)]
        ranked = [TracePoint(2, seqs[0], r) for r in others]
        together = [*lengths, *wider, *ranked]
        if len({id(t) for t in _distinct(self._run(p) for p in together)}) == 1:
            try:
                self._assembler.program(together, [self._run(p) for p in together], _ANY, _ANY)
                return [(_ANY, together)]
            except DoesNotFitError:
                pass
        alone = [*lengths, *(TracePoint(1, seqs[0], r) for r in others)]
        more = [*wider, TracePoint(2, seqs[2], first), TracePoint(4, seqs[0], first), *ranked]
        return [((1, 1), alone), ((2, 0), more)]

    def like(self, donor: Donor) -> Tape:
        """Trace the tape at as few points as the donor's forms need.

        Raises:
            UnlikeError: when the events are not the donor's.
            DoesNotFitError: when a size has another form than the donor's.
        """
        if any(i >= len(self._thresholds) for i in donor.cuts) or len(donor.shapes) != len(self._assembler.params):
            raise UnlikeError("another kind of model")
        pieces = self._pieces(donor.cuts)
        programs = []
        for pattern in donor.patterns:
            if pattern.piece >= len(pieces):
                raise UnlikeError("fewer ranges")
            first = self._ranks[0]
            seqs = _lengths(pieces[pattern.piece])
            batch = max(pattern.batches[0], 1)
            points = [TracePoint(batch, seqs[0], first), TracePoint(batch + (batch > 1), seqs[1], first)]
            points = points[: max(form.terms for form in pattern.forms)]
            traces = [self._run(p) for p in points]
            if _events(traces[0]) != pattern.events:
                raise UnlikeError("events differ")
            piece = pieces[pattern.piece]
            program = pattern.with_sizes(piece, points, traces)
            if program is None:
                program, _ = self._assembler.program(points, traces, pattern.batches, piece, pattern.forms)
            programs.append(program)
        own = [tuple(self._on.local(p).shape) for _, p in self._assembler.params]
        pairs, rank = zip(own, donor.shapes, strict=True), self._ranks[0]
        shapes = [tuple(-(x // rank) if d < 0 else x for x, d in zip(a, b, strict=True)) for a, b in pairs]
        return self._assembler.tape(programs, shapes)

    def at(self, point: TracePoint) -> Tape:
        """Trace the tape for one point alone."""
        traces = [self._run(point)]
        batches, seqs = (point.batch, point.batch), (point.seq, point.seq)
        program, _ = self._assembler.program([point], traces, batches, seqs)
        return self._balanced(self._assembler.tape([program], self._shapes()), point)

    def _shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the parameters; -k stands for k times the LoRA rank."""
        each = [[tuple(self._on.local(p).shape) for p in self._model(rank).parameters()] for rank in self._ranks]
        if len(each) == 1:
            return each[0]
        pairs = zip(each[0], each[1], strict=True)
        rank = self._ranks[0]
        return [tuple(-(a // rank) if a != b else a for a, b in zip(one, two, strict=True)) for one, two in pairs]


def _left_behind(events: Recording | ExpandedTape) -> int:
    """Count the storages that are neither freed nor handed over as a gradient."""
    alive: set[int] = set()
    for op, arg, aux in zip(events.op, events.arg, events.aux, strict=True):
        if op == Op.ALLOC:
            alive.add(arg)
        elif op == Op.FREE:
            alive.discard(arg)
        elif op == Op.GRAD:
            alive.discard(aux)
    return len(alive)


def _events_of(tape: Tape, point: TracePoint) -> tuple[Counter[int], Counter[int], int]:
    """Count a tape's events by kind and its storages by size, and its peak, at one point."""
    events = tape.expand(point.batch, point.seq, point.rank or None)
    return Counter(events.op), Counter(events.storage_bytes), events.activation_peak


def _sides(at: int, thresholds: Sequence[int]) -> tuple[int, int]:
    """Choose lengths on both sides of a threshold, with no other between: multiples of 8, or else neither, since some kernels
    copy a mask whose rows are not, at any length.
    """
    least = max((one for one in thresholds if one < at), default=1)
    most = min((one - 1 for one in thresholds if one > at), default=at + _MASK_ROW)
    for whole in (True, False):
        below = [seq for seq in range(least, at) if (seq % _MASK_ROW == 0) == whole]
        above = [seq for seq in range(at, most + 1) if (seq % _MASK_ROW == 0) == whole]
        if below and above:
            return below[-1], above[0]
    return at - 1, at


def _lengths(seqs: tuple[int, int]) -> tuple[int, int, int]:
    """Choose three sequence lengths within a range."""
    low, high = seqs
    if not high:
        low = -(-low // 128) * 128 if low > 1 else 0
        return low + _STEPS[0], low + _STEPS[1], low + _STEPS[2]
    if high - low >= _STEPS[2]:
        return low + _STEPS[0], low + _STEPS[1], low + _STEPS[2]
    step = max((high - low) // 3, 1)
    return max(high - 2 * step, low), max(high - step, low), high


def _events(trace: Recording) -> tuple[list[int], list[int], list[int]]:
    return trace.op, trace.arg, trace.aux


def _distinct(traces: Iterator[Recording]) -> list[Recording]:
    kept: list[Recording] = []
    for trace in traces:
        if all(_events(trace) != _events(k) for k in kept):
            kept.append(trace)
    return kept
