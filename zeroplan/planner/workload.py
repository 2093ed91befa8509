"""The workload that a request's flags describe, with the defaults filled in and every value checked."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from zeroplan.core.errors import BadInput, member_named
from zeroplan.core.evaluation import Evaluation
from zeroplan.core.images import require_images
from zeroplan.core.lengths import read_lengths, sampled
from zeroplan.core.model_config import SEQ2SEQ_LM, SPEECH_SEQ2SEQ, auto_class_of
from zeroplan.core.optimizer_row import DEFAULT_OPTIMIZER
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.quantization import Base, PackedWeights, Products, Quantization, parse_quantization
from zeroplan.core.saving import Saver, Saving, StateDict
from zeroplan.core.versions import TRANSFORMERS, parse_version, version_text
from zeroplan.core.workload import (
    Attention,
    Batch,
    CheckpointPolicy,
    ChunkedHead,
    Compilation,
    DType,
    GradientCheckpointing,
    Loop,
    Lora,
    Numerics,
    Objective,
    OptimizerKind,
    Precision,
    QuantizedBase,
    Workload,
)
from zeroplan.engines.base import Engine
from zeroplan.models.facts import last_position, max_seq_len, scaled_positions
from zeroplan.models.spec import ModelSpec
from zeroplan.run.ask import Ask
from zeroplan.techniques.float8 import Float8Technique
from zeroplan.techniques.table import TABLE

DEFAULT_SEQ_LEN = 2048
#: No count of a workload goes beyond this; it keeps arithmetic and loops sane.
_MOST = 1 << 31
#: The first transformers that takes quantised weights to the host where FSDP or ZeRO shards them (``modeling_utils.py`` of
#: 4.40.0, ``_load_state_dict_into_meta_model``).
_OLDEST_TRANSFORMERS = (4, 39, 0)
#: Divisions of dtypes whose arithmetic no wrapper casts.
_UNCAST = (Precision.PURE, Precision.FP32)
_E = TypeVar("_E", DType, Attention, Compilation, StateDict, Saver)


def workload_of(request: Ask, engine: Engine, spec: ModelSpec) -> Workload:
    """Return the workload that the request's flags describe.

    Raises:
        BadInput: a value out of range or of an unknown name.
    """
    dtype = _one_of(DType, request.dtype or "bf16", "--dtype")
    _require_counts(request)
    optimizer = find_optimizer(DEFAULT_OPTIMIZER if request.optimizer is None else request.optimizer)
    quantization = _quantization(request)
    older = _before_5(request)
    _require_company(request, spec)
    lengths = _lengths(request)
    precision = request.precision or _precision(request, engine, dtype, quantization)
    source, target = both_lengths(request, spec)
    compiled = _compiled(request)
    if compiled is not None and request.pair_loss is not None:
        raise BadInput("compiled blocks below a loss over pairs are not modelled", where="--compile", remedy="leave it out")
    batch = Batch(
        micro_batch=request.micro_batch or 1,
        seq_len=sequence_length(min(max(lengths), request.seq_len or max(lengths)) if lengths else source, spec),
        grad_accum=request.grad_accum or 1,
        target_len=target,
        lengths=lengths,
        pads=request.pads,
        longest_first=request.longest_first,
        pairs=request.pairs,
        images=request.images,
        image_size=request.image_size,
        labelled_share=request.labelled_share,
    )
    numerics = Numerics(
        dtype=dtype,
        precision=precision,
        optimizer=optimizer.name,
        optimizer_kind=request.optimizer_kind or (OptimizerKind.FUSED if optimizer.fused else OptimizerKind.FOREACH),
        torch_adam=request.torch_adam,
        whole_embedding_states=request.whole_embedding_states,
        attn=_one_of(Attention, request.attn, "--attn"),
        reduce_dtype=_reduction(request, engine, dtype),
    )
    loop = Loop(
        from_scratch=request.from_scratch,
        moved=request.moved,
        set_to_none=request.set_to_none,
        detached_loss=request.detached_loss,
        accelerate_units=request.accelerate_units,
        one_unit=request.one_unit,
        mixed_units=request.mixed_units,
    )
    objective = Objective(
        reference=request.reference,
        kl_batch=request.kl_batch,
        pair_loss=request.pair_loss,
        wide_logits=request.pair_loss is not None and engine.casts_outputs and precision not in _UNCAST,
    )
    techniques = (
        _checkpointing(request, older),
        None if request.lora_rank is None else Lora(request.lora_rank, tuple(request.lora_targets), request.lora_dropout),
        _quantized_base(request, quantization, older=older),
        ChunkedHead() if request.chunked_head else None,
        _evaluation(request, engine),
        _saving(request, engine),
        None if request.generation is None else replace(request.generation, casts=engine.casts_outputs),
        request.colocated,
        compiled,
        *(technique.value(request) for technique in TABLE),
    )
    on = (one for one in techniques if one is not None)
    return Workload(batch, numerics, loop, objective).with_techniques(*on)


def _precision(request: Ask, engine: Engine, dtype: DType, quantization: Base | None) -> Precision:
    """Return the division of dtypes, which ``--base-dtype`` says of frozen weights under adapters.

    Without it they are read in 16 bits, as programs do: ``from_pretrained`` takes the checkpoint's dtype (transformers 5), and
    peft makes adapters beside them fp32.

    Raises:
        BadInput: a dtype in which the engine does not keep frozen weights, or without any.
    """
    whole, where = engine.precision(dtype), "--base-dtype"
    asked = None if request.base_dtype is None else _one_of(DType, request.base_dtype, where)
    if asked is not None and request.lora_rank is None:
        raise BadInput("no frozen weights without adapters", where=where, remedy="give --lora-rank 16 as well")
    if asked is not None and quantization is not None:
        raise BadInput("the base is quantised", where=where, remedy="leave it or --quantize out")
    if request.lora_rank is None:
        return whole
    frozen = engine.base_precision(dtype, quantization)
    if quantization is not None or asked is None or asked is dtype:
        return frozen
    if asked is not DType.FP32 or whole is frozen:
        remedy = f"use {dtype}" + ("" if whole is frozen else " or fp32")
        raise BadInput(f"{engine.name} keeps no frozen weights in {asked} beside --dtype {dtype}", where=where, remedy=remedy)
    return whole


def _checkpointing(request: Ask, older: bool) -> GradientCheckpointing | None:
    """What the backward recomputes; None where it keeps all.

    Raises:
        BadInput: an unknown policy, or a policy or an offload without checkpointing.
    """
    policy = _policy(request)
    if not request.gradient_checkpointing:
        if request.offload_checkpoints:
            what = "every block's input is offloaded where every block is recomputed as a whole"
            remedy = "use --gradient-checkpointing with --checkpoint-policy full"
            raise BadInput(what, where="--offload-checkpoints", remedy=remedy)
        return None
    reentrant = older if request.reentrant is None else request.reentrant
    return GradientCheckpointing(policy, reentrant=reentrant, on_host=request.offload_checkpoints)


def _quantized_base(request: Ask, quantization: Quantization | PackedWeights | None, *, older: bool) -> QuantizedBase | None:
    """The frozen base whose linear layers are quantised, before transformers 5 in other layers and another place."""
    if quantization is None:
        return None
    return QuantizedBase(
        quantization,
        named_by=request.quantized_by,
        adapter_dtype=None if request.adapter_dtype is None else _one_of(DType, request.adapter_dtype, "adapter_dtype"),
        whole=request.whole_base or isinstance(quantization, PackedWeights),
        linear_experts=older and quantization.products in (Products.NESTED, Products.SINGLE),
        on_host=older,
    )


def _require_counts(request: Ask) -> None:
    """Refuse counts that are none.

    Raises:
        BadInput: naming the flag.
    """
    for where, value in (
        ("--micro-batch", request.micro_batch),
        ("--seq-len", request.seq_len),
        ("--source-len", request.source_len),
        ("--target-len", request.target_len),
        ("--grad-accum", request.grad_accum),
        ("--lora-rank", request.lora_rank),
        ("--images", request.images or None),
        ("--image-size", request.image_size),
        ("--eval-batch", request.eval_batch),
        ("--eval-logits", request.eval_logits or None),
    ):
        if value is not None and not 1 <= value <= _MOST:
            raise BadInput(f"{value} is out of range", where=where, remedy="use a whole number above zero")


def _quantization(request: Ask) -> Quantization | PackedWeights | None:
    """The format of the base.

    Raises:
        BadInput: adapters' targets without adapters, or a base that nothing is trained beside.
    """
    if request.lora_targets and request.lora_rank is None:
        raise BadInput("targets without a rank", where="--lora-targets", remedy="give --lora-rank 16 as well")
    quantization = None if request.quantize is None else parse_quantization(request.quantize)
    if quantization is not None and request.lora_rank is None and not request.built:
        raise BadInput(
            "a quantised base is frozen", where=request.quantized_by, remedy="give --lora-rank 16 to train adapters beside it"
        )
    return quantization


def _require_company(request: Ask, spec: ModelSpec) -> None:
    """Refuse values that mean nothing without another, or that the model does not take.

    Raises:
        BadInput: naming the flag.
    """
    if request.adapter_dtype is not None and request.quantize is None:
        raise BadInput("adapters without a quantised base", where="adapter_dtype", remedy="give quantize as well")
    if request.image_size is not None and not request.images:
        raise BadInput("a size without images", where="--image-size", remedy="give --images 1 as well")
    if request.images:
        require_images(spec.model_type)
    if request.images and request.depth == "formula":
        raise BadInput("images are known to a trace alone", where="--images", remedy="leave --depth out")
    if request.labelled_share is not None and not 0 < request.labelled_share <= 1:
        raise BadInput(
            f"{request.labelled_share} is no share of the tokens", where="--labelled-share", remedy="use 0.15 for 15 %"
        )


def _policy(request: Ask) -> CheckpointPolicy:
    """What is recomputed.

    Raises:
        BadInput: an unknown policy, or one without checkpointing.
    """
    policy = CheckpointPolicy.parse(request.checkpoint_policy)
    if policy != CheckpointPolicy() and not request.gradient_checkpointing:
        raise BadInput(
            "a policy without checkpointing", where="--checkpoint-policy", remedy="give --gradient-checkpointing as well"
        )
    return policy


def _reduction(request: Ask, engine: Engine, dtype: DType) -> DType | None:
    """The dtype in which gradients are reduced, where it is not the engine's own.

    Raises:
        BadInput: an engine that takes none, or a dtype that is neither fp32 nor that of the products.
    """
    if request.reduce_dtype is None:
        return None
    where = "--reduce-dtype"
    found = _one_of(DType, request.reduce_dtype, where)
    if found not in (DType.FP32, dtype):
        raise BadInput(f"gradients made in {dtype} are not reduced in {found}", where=where, remedy=f"use fp32 or {dtype}")
    return found


def _before_5(request: Ask) -> bool:
    """Return whether transformers is one before 5.

    Raises:
        BadInput: a version that is not known.
    """
    if request.transformers_version is None:
        return False
    where = "--transformers-version"
    asked, known = parse_version(request.transformers_version, where), parse_version(TRANSFORMERS)
    if not _OLDEST_TRANSFORMERS <= asked <= known:
        oldest = version_text(_OLDEST_TRANSFORMERS)
        raise BadInput(
            f"of transformers {oldest} to {TRANSFORMERS} are known", where=where, remedy=f"use {oldest} or {TRANSFORMERS}"
        )
    return asked < (5, 0, 0)


def _compiled(request: Ask) -> Compilation | None:
    """What is compiled.

    Raises:
        BadInput: beside what no compiled graph is traced with.
    """
    if request.compile is None:
        return None
    beside = {
        request.quantized_by: request.quantize is not None,
        "--fp8": request[Float8Technique.fp8] is not None,
        "--images": bool(request.images),
        "--lengths": bool(request.lengths),
        "--checkpoint-policy": CheckpointPolicy.parse(request.checkpoint_policy).selective,
    }
    if hasattr(request.model, "named_parameters"):
        raise BadInput("live modules are planned as written", where="compile", remedy="leave it out")
    for flag, given in beside.items():
        if given:
            raise BadInput(
                f"compiled graphs with {flag} are not modelled", where="--compile", remedy="leave one of the two out"
            )
    compiled = _one_of(Compilation, request.compile, "--compile")
    if compiled is Compilation.CHECKPOINTED and not request.gradient_checkpointing:
        raise BadInput(
            "the checkpoints of checkpointed-blocks are those of gradient checkpointing, which is off",
            where="--compile",
            remedy="give --gradient-checkpointing, or use blocks",
        )
    return compiled


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
    if request.lengths is not None:
        raise BadInput("lengths of both sides that vary are not modelled", where="--lengths", remedy="give the longest of each")
    if max(request.tp, request.cp, request.ulysses, request.pp) > 1:
        raise BadInput("two lengths are planned on data-parallel ranks alone", where=given[0], remedy="leave the degrees out")
    source = sequence_length(request.source_len or request.seq_len, spec)
    target = sequence_length(request.target_len or request.seq_len, spec)
    return source, None if target == source else target


def _lengths(request: Ask) -> tuple[int, ...]:
    """Return the lengths of samples that are padded batch by batch; none where all are alike.

    Raises:
        BadInput: no lengths in what was given.
    """
    if request.lengths is None:
        return ()
    return read_lengths(request.lengths) if isinstance(request.lengths, str) else sampled(request.lengths)


def _evaluation(request: Ask, engine: Engine) -> Evaluation | None:
    """Return the evaluation between steps.

    Raises:
        BadInput: logits kept without an evaluation.
    """
    if request.eval_batch is None:
        if request.eval_logits:
            raise BadInput("logits without an evaluation", where="--eval-logits", remedy="give --eval-batch 8 as well")
        return None
    return Evaluation(request.eval_batch, request.eval_logits, casts=engine.casts_outputs)


def _saving(request: Ask, engine: Engine) -> Saving | None:
    """Return what is saved between steps.

    Raises:
        BadInput: an unknown form or program, a form that the engine does not have, or a saver where nothing is saved.
    """
    if request.save is None:
        for where, given in (("--save-by", request.save_by), ("--save-only-model", request.save_only_model)):
            if given:
                raise BadInput("nothing is saved", where=where, remedy="give --save sharded or --save full as well")
        return None
    form = _one_of(StateDict, request.save, "--save")
    return Saving(
        form,
        _one_of(Saver, request.save_by or Saver.LOOP, "--save-by"),
        optimizer=not request.save_only_model,
    )


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


def _one_of(kind: type[_E], text: str, where: str) -> _E:
    return member_named(kind, text, where=where)
