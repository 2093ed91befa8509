"""A case's tape: shipped or cached (both without torch), else traced now and cached."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeroplan.core.errors import BadInput
from zeroplan.core.evaluation import Evaluation
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.generation import Generation
from zeroplan.core.lengths import padded_batches
from zeroplan.core.model_config import text_config
from zeroplan.core.parameters import Parameters
from zeroplan.core.workload import (
    Attention,
    CheckpointPolicy,
    ChunkedHead,
    Compilation,
    GradientCheckpointing,
    Lora,
    Precision,
    Reference,
    Workload,
)
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.models.facts import spec_facts
from zeroplan.models.spec import ModelSpec
from zeroplan.tape.chunked_head import chunked_head_of, with_chunked_forward, with_chunked_head
from zeroplan.tape.copied_logits import with_copied_logits
from zeroplan.tape.expanded import AUTOCAST_LAYERS, QUANTIZED_LAYERS, EvaluationTape, ExpandedTape, Kind, Op, blocks_of
from zeroplan.tape.format import Tape
from zeroplan.tape.generation import CachedModel, generation_tape
from zeroplan.tape.options import Checkpointing, TraceOptions, evaluation_options, options_for
from zeroplan.tape.reference_forward import forward_without_gradients, with_forward_before, with_reference
from zeroplan.tape.sizes import KernelDevice
from zeroplan.tapes import lookup, tape_for
from zeroplan.techniques.compiled import COMPILED
from zeroplan.techniques.freeze import FrozenParts
from zeroplan.techniques.fused_adapters import FusedAdapters
from zeroplan.techniques.older_transformers import CopiedLogits
from zeroplan.techniques.table import techniques_of

#: Layers that are simulated at most, several stacks' together: each is played, so time and memory grow with them. Published
#: models have some 300; at this bound a table of every stage takes about 10 s of one core and 700 MB.
MOST_LAYERS = 512


class NoTapeError(Exception):
    """No tape can be had for a model; the text says why.

    Args:
        what: the reason.
        remedy: what a user does to get the figures that need a tape.
    """

    def __init__(self, what: str, *, remedy: str = "measure a few steps by zeroplan verify") -> None:
        super().__init__(what)
        self.remedy = remedy


def _traced(spec: ModelSpec, options: TraceOptions, workload: Workload) -> Tape:
    try:
        return tape_for(spec, options, workload)
    except BadInput:
        raise
    except Exception as error:  # the model's own code runs here and may raise anything
        text = " ".join(str(error).split())[:160]
        raise NoTapeError(f"{spec.name} cannot be traced ({type(error).__name__}: {text})") from error


def _in_tiles_of_trl(work: Workload) -> bool:
    head = work.technique(ChunkedHead)
    return head is not None and not head.tokens


def expand_for(tape: Tape, case: Case, *, trace: bool = False, zero3: bool = False) -> ExpandedTape:
    """Expand a tape for a case's micro batch, sequence length, LoRA rank and GPU, with the forward of its evaluation.

    Args:
        case: the numbers.
        trace: trace the evaluation's forward where it is not at hand; else the tape comes without it.
        zero3: the tape is one of stage 3, which a reference model is sharded by, too.

    Raises:
        BadInput: when the tape was traced for other numbers.
    """
    work = case.workload
    seq = (work.batch.seq_len or 1) // options_for(work, layout=case.layout).split_tokens
    rows = work.batch.micro_batch if work.objective.pair_loss is not None else work.batch.rows  # that tape counts pairs
    expanded = tape.expand(rows, seq, work.lora_rank, device=KernelDevice.of(case.cluster.gpu))
    if _in_tiles_of_trl(work):
        expanded = with_chunked_head(expanded, batch=work.batch.rows, seq_len=seq, share=work.batch.labelled_share)
    for technique, value in techniques_of(work):
        expanded = technique.expanded(value, expanded, work)
    if work.objective.kl_batch:
        expanded = with_forward_before(expanded, _without_gradients(case))
    if work.objective.reference is not None:
        base = replace(case, workload=work.without(Lora))
        passes, hooked = 2 if work.objective.kl_batch else 1, zero3 and work.objective.reference is Reference.MODEL
        expanded = with_reference(expanded, _without_gradients(base, zero3=hooked), passes=passes, hooked=hooked)
    if work.has(Generation):
        expanded = replace(expanded, generation=_generated(case))
    if work.batch.lengths:
        expanded = replace(expanded, shapes=_shapes(tape, case, zero3=zero3))
    if (
        not work.has(Evaluation)
        or work.objective.reference is not None
        or work.objective.kl_batch
        or work.objective.pair_loss is not None
    ):
        return expanded
    return replace(expanded, evaluation=evaluation_tape(case, expanded, trace=trace))


def _shapes(tape: Tape, case: Case, *, zero3: bool) -> tuple[ExpandedTape, ...]:
    """Return the micro batches of other lengths that come before the longest; none for a tape of one length."""
    known: dict[int, ExpandedTape] = {}
    work = case.workload
    try:
        for length in padded_batches(work.batch.lengths, work.batch.rows, cut=work.batch.seq_len)[:-1]:
            if length not in known:
                shorter = work.but(seq_len=length, lengths=()).without(Evaluation)
                known[length] = expand_for(tape, replace(case, workload=shorter), zero3=zero3)
    except BadInput:
        return ()
    return tuple(known[length] for length in padded_batches(work.batch.lengths, work.batch.rows, cut=work.batch.seq_len)[:-1])


def _generated(case: Case) -> ExpandedTape | None:
    """Return the events of what the case generates before a step; None where the model's cache is of another kind."""
    work = case.workload
    generation = work.technique(Generation)
    if generation is None or not known_cache(case):
        return None
    rows = generation.rows(work.batch.micro_batch, work.batch.grad_accum, case.layout.dp)
    prompts = work.but(micro_batch=rows, seq_len=generation.prompt, pairs=False).without(ChunkedHead)
    return generated(case, _without_gradients(replace(case, workload=prompts)))


def _without_gradients(case: Case, *, zero3: bool = False) -> ExpandedTape:
    """Return the tape whose forward stands for one without gradients over the case's batch: checkpointed."""
    work = case.workload.but(reference=None, kl_batch=False, lengths=()).without(Evaluation, Generation, Compilation)
    again = work.technique(GradientCheckpointing) or GradientCheckpointing()
    work = work.with_techniques(replace(again, policy=CheckpointPolicy()))
    options = options_for(work, zero3=zero3)
    return expand_for(lookup(case.spec, options) or _traced(case.spec, options, work), replace(case, workload=work))


def expanded_tape_of(engine: Engine, case: Case) -> ExpandedTape:
    """Return the case's tape, expanded for its micro batch and sequence length.

    Raises:
        NoTapeError: when the model cannot be traced here.
        BadInput: when it has more layers than are simulated.
    """
    own = engine.own_tape(case)
    if own is not None:
        return own
    case = replace(case, workload=engine.traced(case.workload))
    spec, workload = case.spec, case.workload
    if not spec.config or not spec.has_shapes:
        raise NoTapeError(
            f"{spec.name}: {spec.source} gives parameters but no architecture to trace",
            remedy="give inputs=, one micro batch" if spec.source == "module" else "give the model's id or config.json",
        )
    _require_layers(spec)
    asked = engine.trace_options(case)
    zero3 = asked.zero3
    try:
        apart = asked.grouped or asked.checkpointing is Checkpointing.REENTRANT
        tape = _with_recomputation(case, asked) if apart else None
        options = _gathered(options_for(workload, zero3=zero3, layout=case.parallel), asked)
        tape = tape or lookup(spec, options)
        if tape is None:
            if sys.stderr.isatty():
                print(f"tracing {spec.name}, once …", file=sys.stderr)
            tape = _traced(spec, options, workload)
        expanded = expand_for(tape, case, trace=True, zero3=zero3)
        _require_all_parameters(expanded, case)
        if case.halves:
            expanded = replace(expanded, halves=_halves(case))
        return (
            expanded if workload.compile is None or not COMPILED.starts_eager(engine) else _after_eager(engine, expanded, case)
        )
    except NoTapeError as error:
        if workload.batch.media:  # no formula knows what images and sound keep
            raise BadInput(str(error), where="--images") from error
        raise
    except BadInput as error:
        if workload.batch.media:
            raise
        raise NoTapeError(str(error), **({"remedy": error.remedy} if error.remedy else {})) from None


def _gathered(options: TraceOptions, asked: TraceOptions) -> TraceOptions:
    """Return a workload's options with parameters in the dtype in which an engine gathers them, which its own options say."""
    return replace(options, arithmetic=asked.arithmetic, base=asked.base)


def tape_at_hand(engine: Engine, case: Case, *, plain: bool | None = None) -> ExpandedTape | None:
    """Return the case's tape where it is shipped or cached; None where it would have to be traced.

    Args:
        plain: see :func:`zeroplan.tapes.find_tape`.
    """
    asked = engine.trace_options(case)
    options = _gathered(options_for(engine.traced(case.workload), zero3=asked.zero3, layout=case.parallel), asked)
    stored = lookup(case.spec, options, plain=plain)
    return None if stored is None else expand_for(stored, case, zero3=asked.zero3)


def _require_all_parameters(tape: ExpandedTape, case: Case) -> None:
    """Refuse a tape of another model: one with more or fewer blocks than the config says, or with other frozen parts.

    Raises:
        NoTapeError: when the tape's parameters are not the model's.
    """
    have, want = (_without_adapters(one) for one in (tape.parameters, case.spec.parameters))
    whole = case.layout.tp == case.layout.ep == 1  # ranks have other shapes else
    # Less than any block: ESM has a weight for each head of each block, whose traced length is that of the traced blocks.
    few = want // 2000
    if whole and not case.spec.parameters.stand_in and abs(have - want) > few:
        raise NoTapeError(
            f"{case.spec.name}: the traced model has {have:,} parameters, the config says {want:,}",
            remedy="report it with the config",
        )
    if case.workload.has(FrozenParts) and _trained(tape.parameters) != _trained(case.spec.parameters):
        raise NoTapeError(f"{case.spec.name}: the traced model trains other parameters than the config says")


def _trained(parameters: Parameters) -> set[str]:
    return {name for name, trains in zip(parameters.names, parameters.trainable, strict=True) if trains}


def _without_adapters(parameters: Parameters) -> int:
    """Count parameters but those of adapters, of which what is adapted decides."""
    return sum(size for name, size in zip(parameters.names, parameters.numel, strict=True) if ".lora_" not in name)


def _with_recomputation(case: Case, asked: TraceOptions) -> Tape | None:
    """Return the case's tape with the engine's own way of recomputation; None where a model cannot be traced with reentrant
    checkpoints, whose tape without reentrance differs in single tensors.
    """
    plain = _gathered(options_for(case.workload, layout=case.parallel), asked)
    options = replace(plain, grouped=asked.grouped, checkpointing=asked.checkpointing)
    try:
        return lookup(case.spec, options) or tape_for(case.spec, options, case.workload)
    except Exception:
        if asked.grouped:
            raise
        return None


def _halves(case: Case) -> ExpandedTape:
    """Return the case's tape with its backward in two halves."""
    options = replace(options_for(case.workload, layout=case.parallel), halves=True)
    return expand_for(lookup(case.spec, options) or tape_for(case.spec, options, case.workload), case)


def _after_eager(engine: Engine, tape: ExpandedTape, case: Case) -> ExpandedTape:
    """Return the tape behind a micro batch of the model as written."""
    written = replace(case, workload=engine.traced(case.workload.without(Compilation, Evaluation)))
    zero3 = engine.trace_options(written).zero3
    options = options_for(written.workload, zero3=zero3, layout=case.parallel)
    stored = lookup(case.spec, options) or _traced(case.spec, options, written.workload)
    return replace(tape, shapes=(*tape.shapes, expand_for(stored, written)))


def _require_layers(spec: ModelSpec) -> None:
    layers = sum(unit.count for unit in spec.units if unit.block)
    if layers > MOST_LAYERS:
        raise BadInput(
            f"{spec.name} has {layers:,} layers; at most {MOST_LAYERS} are simulated",
            where="MODEL",
            remedy="use --depth formula",
        )


class ExpandedTapes:
    """The expanded tapes of one request. Its cases differ only in sharding, so each tape is looked for once, found or not."""

    #: Whether a CPU's kernels keep other tensors than CUDA's, for which tapes are made; None leaves it to the model's config.
    cpu_differs: bool | None = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, ExpandedTape | NoTapeError] = {}

    def of(self, case: Case) -> ExpandedTape:
        """Return the case's expanded tape.

        Raises:
            NoTapeError: when the model cannot be traced here, or the engine simulates no such case.
        """
        if not self._engine.simulates(case):
            raise NoTapeError(
                f"this under {self._engine.name} is not simulated", remedy="use --engine fsdp2, which simulates it"
            )
        if self._engine.own_layers:
            return expanded_tape_of(self._engine, case)
        key = self._engine.trace_options(case).key + ("_halves" if case.halves else "")
        if key not in self._known:
            try:
                self._known[key] = self._tape_of(case)
            except NoTapeError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, NoTapeError):
            raise found
        return found

    def _tape_of(self, case: Case) -> ExpandedTape:
        """Return the case's tape; where fused adapters cannot be traced, that of peft's own, which keep more."""
        try:
            return expanded_tape_of(self._engine, case)
        except NoTapeError:
            if not case.workload.has(FusedAdapters):
                raise
            return expanded_tape_of(self._engine, replace(case, workload=case.workload.without(FusedAdapters)))


_FP32 = 4


def evaluation_tape(case: Case, tape: ExpandedTape, *, trace: bool) -> EvaluationTape | None:
    """Return the forward of the case's evaluation; None where it is not known: without a tape, or on other modules.

    Args:
        tape: of the training, whose modules the evaluation runs.
        trace: trace it where it is neither shipped nor cached.
    """
    work = case.workload
    evaluation = work.technique(Evaluation)
    if evaluation is None or max(case.layout.pp, case.layout.cp, case.layout.ulysses) > 1 or work.batch.media:
        return None
    options = evaluation_options(work, case.parallel)
    stored = lookup(case.spec, options)
    if stored is None and trace:
        try:
            stored = tape_for(case.spec, options, work)
        except Exception:  # the model's own code runs here; the plan says that the evaluation is in no figure
            stored = None
    if stored is None:
        return None
    rows = evaluation.batch * (2 if work.batch.pairs else 1)
    seq = (work.batch.seq_len or 1) // options.split_tokens
    try:
        forward = stored.expand(rows, seq, work.lora_rank, device=KernelDevice.of(case.cluster.gpu))
    except BadInput:  # traced for other numbers
        return None
    if [module.name for module in forward.modules] != [module.name for module in tape.modules]:
        return None
    logits = _logits(forward) if evaluation.kept else 0
    if evaluation.kept and not logits:
        return None
    if _in_tiles_of_trl(work):
        forward = with_chunked_forward(forward, batch=rows, seq_len=seq, share=work.batch.labelled_share)
    if work.has(CopiedLogits):
        forward = with_copied_logits(forward, rows, seq)
    casts = evaluation.casts and work.numerics.precision is not Precision.PURE
    returned = logits * _FP32 // work.numerics.dtype.bytes if casts else logits
    ranks = case.layout.dp
    return EvaluationTape(
        forward=replace(forward, evaluation=None),
        logits=logits,
        returned=returned,
        gathered=returned * ranks if ranks > 1 else 0,
        batches=max(1, evaluation.kept),
    )


def _logits(tape: ExpandedTape) -> int:
    """Bytes of the logits as the head makes them; 0 for a model without a vocabulary's head."""
    kinds = zip(tape.op, tape.aux, tape.kind, strict=True)
    return next((size for op, size, kind in kinds if op == Op.ALLOC and kind == Kind.LOGITS), 0)


#: Model types whose layers all keep rotated keys and values of every token in a cache that grows (transformers 5.17,
#: ``DynamicCache``), unless their config slides a window.
GROWING_CACHES = frozenset(
    ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "granite", "olmo", "olmo2", "smollm3")
)


def known_cache(case: Case) -> bool:
    """Return whether the cache of the case's model grows as is modelled here."""
    work, config = case.workload, text_config(case.spec.config)
    facts = spec_facts(case.spec)
    known = None not in (facts.kv_heads, facts.head_dim, facts.heads, facts.vocab_size)
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    plain = case.parallel is None and work.batch.media is None and not work.has(Float8Recipe)
    alone = plain and work.numerics.attn is Attention.SDPA
    return known and case.spec.model_type in GROWING_CACHES and not slides and alone


def generated(case: Case, prompts: ExpandedTape) -> ExpandedTape | None:
    """Return the events of what the case generates before a step; None where the model's head is of another kind.

    Args:
        case: the run.
        prompts: the tape of a checkpointed forward over all prompts of a rank.
    """
    work, facts = case.workload, spec_facts(case.spec)
    generation, head = work.technique(Generation), chunked_head_of(prompts.modules)
    assert generation is not None
    heads, kv_heads, width = facts.heads or 0, facts.kv_heads or 0, facts.head_dim or 0
    rows = generation.rows(work.batch.micro_batch, work.batch.grad_accum, case.layout.dp)
    compute = work.numerics.dtype.bytes
    key_width = max(compute, work.numerics.param_bytes)
    inner = text_config(case.spec.config).get("intermediate_size")
    words = rows * (facts.vocab_size or 0)
    model = CachedModel(
        key=rows * kv_heads * width * key_width,
        value=rows * kv_heads * width * compute,
        repeats=heads // kv_heads,
        compute=compute,
        key_width=key_width,
        inner=rows * compute * (inner if isinstance(inner, int) else 0),
        logits=words * compute,
        words=words,
        casts=generation.casts and work.numerics.precision is not Precision.PURE,
        weights=_weights(case, prompts, head),
    )
    return generation_tape(prompts, forward_without_gradients(prompts), head, generation, model)


def _weights(case: Case, tape: ExpandedTape, head: int) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Return what each block's products make of its weights, and the head's: casts of fp32 ones under autocast, of which those
    of trained weights stay, and quantised ones in 16 bits; nothing where all are in 16 bits.
    """
    compute, params = case.workload.numerics.dtype.bytes, tape.params
    autocast = case.workload.numerics.precision is Precision.AUTOCAST
    blocks = blocks_of(tape.modules)
    place = {block: at for at, block in enumerate(blocks)}
    found: list[list[tuple[int, bool]]] = [[] for _ in range(len(blocks) + 1)]
    home: dict[int, int] = {}
    for index, module in enumerate(tape.modules):
        home[index] = place.get(index, home.get(module.parent, len(blocks)))
        packed = module.type in QUANTIZED_LAYERS
        if not packed and not (autocast and module.type in AUTOCAST_LAYERS):
            continue
        for p in module.params:
            shape = params[p].shape
            if len(shape) == 2 and (packed or params[p].itemsize != compute):
                at = home[index] if index != head else len(blocks)
                found[at].append((shape[0] * shape[1] * compute, params[p].trainable and not packed))
    return tuple(tuple(one) for one in found) if any(found) else ()


#: Two ways in which a micro batch was run: as the model's code has it, and through the hooks of DeepSpeed's stage 3.
PLAIN, ZERO3 = "plain", "zero3"


@dataclass(frozen=True)
class RecordedRun:
    """Micro batches as a script ran them.

    Attributes:
        tapes: by the way they were run, the first micro batches of other shapes, then the largest.
        other_bytes: on the GPU beside the model's parameters all the time, its registered buffers among them.
    """

    tapes: Mapping[str, tuple[Tape, ...]]
    other_bytes: int = 0


class RecordedTapes(ExpandedTapes):
    """The tapes of one recorded run, whatever the case asks for."""

    def __init__(self, engine: Engine, recorded: RecordedRun) -> None:
        super().__init__(engine)
        self._asked, self._recorded = engine, recorded
        self._expanded: dict[str, ExpandedTape] = {}

    def of(self, case: Case) -> ExpandedTape:
        """Return the tape; see :meth:`ExpandedTapes.of`."""
        way = ZERO3 if self._asked.trace_options(case).zero3 else PLAIN
        if way not in self._recorded.tapes:
            raise NoTapeError("no micro batch was recorded in this way", remedy="capture more steps (--steps)")
        if way not in self._expanded:
            batch, device = case.workload.batch, KernelDevice.of(case.cluster.gpu)
            *first, largest = (
                tape.expand(batch.micro_batch, batch.seq_len or 1, None, device=device) for tape in self._recorded.tapes[way]
            )
            self._expanded[way] = replace(largest, shapes=tuple(first), buffers=(self._recorded.other_bytes,))
        return self._expanded[way]
