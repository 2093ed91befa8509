"""The workload that a request's options describe, with the defaults filled in and every value checked."""

from __future__ import annotations

from typing import Any

from zeroplan.core.errors import BadInput, member_named
from zeroplan.core.model_config import SEQ2SEQ_LM, SPEECH_SEQ2SEQ, auto_class_of
from zeroplan.core.optimizer_row import DEFAULT_OPTIMIZER
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.workload import Attention, Batch, DType, Loop, Numerics, Precision, Workload
from zeroplan.engines.base import Engine
from zeroplan.models.facts import last_position, max_seq_len, scaled_positions
from zeroplan.models.spec import ModelSpec
from zeroplan.run.ask import Ask
from zeroplan.techniques.table import TABLE

DEFAULT_SEQ_LEN = 2048
#: Divisions of dtypes whose arithmetic no wrapper casts.
_UNCAST = (Precision.PURE, Precision.FP32)


def workload_of(request: Ask, engine: Engine, spec: ModelSpec) -> Workload:
    """Return the workload that the request's options describe: those of a technique in the technique's own file.

    Raises:
        BadInput: a value out of range or of an unknown name.
    """
    dtype = member_named(DType, request.dtype or "bf16", where="--dtype")
    optimizer = find_optimizer(DEFAULT_OPTIMIZER if request.optimizer is None else request.optimizer)
    leaves: dict[str, Any] = {"precision": engine.precision(dtype)}
    for technique in TABLE:
        leaves |= technique.leaves(request, engine)
    if request.precision is not None:
        leaves["precision"] = request.precision
    source, target = both_lengths(request, spec)
    if lengths := leaves["lengths"]:
        source = min(max(lengths), request.seq_len or max(lengths))
    batch = Batch(
        micro_batch=request.micro_batch or 1,
        seq_len=sequence_length(source, spec),
        grad_accum=request.grad_accum or 1,
        target_len=target,
    )
    numerics = Numerics(
        dtype=dtype,
        optimizer=optimizer.name,
        optimizer_kind=request.optimizer_kind or engine.usual_kind(optimizer),
        torch_adam=request.torch_adam,
        whole_embedding_states=request.whole_embedding_states,
        attn=member_named(Attention, request.attn, where="--attn"),
    )
    loop = Loop(
        from_scratch=request.from_scratch,
        moved=request.moved,
        detached_loss=request.detached_loss,
        own_loop=request.own_loop,
        accelerate_units=request.accelerate_units,
        one_unit=request.one_unit,
        mixed_units=request.mixed_units,
    )
    wide = leaves["pair_loss"] is not None and engine.casts_outputs and leaves["precision"] not in _UNCAST
    work = Workload(batch, numerics, loop).but(**leaves, wide_logits=wide)
    found = (technique.value(request, engine) for technique in TABLE)
    return work.with_techniques(*(one for one in found if one is not None))


def both_lengths(request: Ask, spec: ModelSpec) -> tuple[int | None, int | None]:
    """Return the length that a tape's sequences have, and that of an encoder-decoder's targets where it is another one.

    A source of sound has the length of the model's config, and the sequences are its targets.

    Raises:
        BadInput: lengths of a model that has no two sides, or beside what is planned with one length alone.
    """
    asked = {"--source-len": request.source_len, "--target-len": request.target_len}
    given = [flag for flag, length in asked.items() if length is not None]
    if not given:
        return request.seq_len, None
    if request.seq_len is not None and len(given) == 2:
        raise BadInput("a length of both sides beside each side's", where="--seq-len", remedy="leave it out")
    auto_class = spec.auto_class or (auto_class_of(spec.config) if spec.config else "")
    if auto_class == SPEECH_SEQ2SEQ:
        if request.source_len is not None:
            raise BadInput(
                "the config says how many frames a source has", where="--source-len", remedy="give --target-len alone"
            )
        if request.seq_len is not None:
            raise BadInput("a second length of the targets", where="--seq-len", remedy="give --target-len alone")
        return request.target_len, None
    if auto_class != SEQ2SEQ_LM:
        raise BadInput(f"{spec.name} is no encoder-decoder of text", where=given[0], remedy="give --seq-len")
    if "lengths" in request:
        raise BadInput("lengths of both sides that vary are not modelled", where="--lengths", remedy="give the longest of each")
    if max(request.tp, request.cp, request.ulysses, request.pp) > 1:
        raise BadInput("two lengths are planned on data-parallel ranks alone", where=given[0], remedy="leave the degrees out")
    source = sequence_length(request.source_len or request.seq_len, spec)
    target = sequence_length(request.target_len or request.seq_len, spec)
    return source, None if target == source else target


def sequence_length(asked: int | None, spec: ModelSpec) -> int:
    """The length that was asked for, else 2048 or the model's maximum if that is less.

    Raises:
        BadInput: when the model cannot take the length that was asked for.
    """
    most = max_seq_len(spec)
    if asked is None:
        return min(DEFAULT_SEQ_LEN, most) if most else DEFAULT_SEQ_LEN
    if most is not None and asked > most and last_position(spec) is not None:
        raise BadInput(f"{asked} is beyond the model's {most} positions", where="--seq-len", remedy=f"use at most {most}")
    return asked


def beyond_positions(workload: Workload, spec: ModelSpec) -> str:
    """Return a warning where samples are longer than what the model was made for; empty where they are not."""
    most, seq = max_seq_len(spec), workload.batch.seq_len
    if most is None or seq is None or seq <= most:
        return ""
    scaled = scaled_positions(spec)
    how = (
        f"its config scales them ({scaled})"
        if scaled
        else "its config scales none: what it learns beyond them is another matter"
    )
    return f"{seq:,} tokens are beyond the {most:,} positions that {spec.name} was made for; {how}"
