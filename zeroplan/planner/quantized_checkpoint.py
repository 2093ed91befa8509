"""What a checkpoint's own ``quantization_config`` makes of a plan: a quantised base, 16-bit weights, or nothing that is known.

Source: transformers 5.17 ``quantizers/auto.py`` (``AUTO_QUANTIZATION_CONFIG_MAPPING``, ``get_hf_quantizer``,
``merge_quantization_configs``), the ``is_trainable`` of each ``quantizers/quantizer_*.py``, ``trainer_utils.py``
(``validate_quantization_for_training``), ``utils/quantization_config.py`` (defaults of ``BitsAndBytesConfig``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.quantization import Base, PackedWeights, Quantization
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.engines.base import Engine
from zeroplan.models.quantized import why_not_quantized
from zeroplan.models.spec import ModelSpec
from zeroplan.techniques.quantized_base import QUANTIZED_BASE

#: The key of a model's config that says how its weights are kept.
KEY = "quantization_config"
_BITSANDBYTES = "bitsandbytes"
_TORCHAO = "torchao"
_HALF = ("bfloat16", "float16")
#: Adapters train beside these in their own formats, by kernels that no tape holds.
_TRAINABLE = (
    *("gptq", "awq", "aqlm", "quanto", "eetq", "hqq", "compressed-tensors", "torchao", "sinq"),
    *("bitnet", "fp_quant", "fouroversix"),
)
#: Of those, the ones whose weights are integers in the checkpoint's own shapes.
_PACKED = ("gptq", "awq")
#: transformers trains nothing over these, and makes 16-bit weights of them where it is asked to.
_DEQUANTIZED = ("mxfp4", "fp8", "metal", "mxfp8", "higgs", "gguf")
#: transformers trains nothing over these, and cannot dequantise them.
_FOR_INFERENCE = ("quark", "fbgemm_fp8", "vptq", "spqr", "nvfp4", "auto-round", "gemma")
#: Every method that transformers knows.
METHODS = frozenset({_BITSANDBYTES, *_TRAINABLE, *_DEQUANTIZED, *_FOR_INFERENCE})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How a checkpoint keeps its weights.

    Attributes:
        method: the name that transformers knows; empty where none is given.
        quantize: the base that adapters would stand beside, where it is modelled.
        in_bytes: whether the values of that base are stored in bytes, which FSDP does not shard.
        left_out: what the plan of a checkpoint in this form leaves out, if `quantize` is None.
    """

    method: str
    quantize: Base | None
    left_out: tuple[Unmodelled, ...] = ()
    in_bytes: bool = False


def read_checkpoint(config: Mapping[str, Any]) -> Checkpoint | None:
    """Return how a model's config says that its weights are kept; None where they are not quantised.

    Raises:
        BadInput: the config says it by something else than an object.
    """
    said = config.get(KEY)
    text = config.get("text_config")
    if said is None and isinstance(text, Mapping):
        said = text.get(KEY)
    if said is None:
        said = config.get("compression_config")  # of compressed-tensors, before it had the common name
    if not said:
        return None
    if not isinstance(said, Mapping):
        raise BadInput(f"{str(said)[:40]!r} is not an object", where=KEY, remedy="write what transformers writes, or remove it")
    bits = next((bits for bits in (4, 8) if said.get(f"load_in_{bits}bit")), None)
    method = _BITSANDBYTES if bits else str(said.get("quant_method") or "")[:40]
    if method == _BITSANDBYTES:
        return _bitsandbytes(said, bits)
    if method in _PACKED:
        return _packed(method, said)
    if method == _TORCHAO:
        return _torchao(said)
    if method in _DEQUANTIZED and said.get("dequantize") is True:
        return None
    return Checkpoint(method, None, (_left_out(method),))


def base_of(spec: ModelSpec, asked: str | None, engine: Engine, *, adapters: bool) -> Checkpoint | None:
    """Return how the checkpoint is kept, and what of it the plan holds.

    Args:
        asked: the format of the base that the request names, which a quantised checkpoint does not turn into another.
        engine: what trains.
        adapters: whether LoRA is trained.

    Raises:
        BadInput: the checkpoint is kept in another form than the one asked for.
    """
    found = read_checkpoint(spec.config)
    if found is None:
        return None
    if asked is not None:
        if found.quantize is not None and asked.strip().lower() == str(found.quantize):
            return found
        how = found.quantize or found.method or "a method that it does not name"
        raise BadInput(
            f"the checkpoint is quantised already ({how}), and transformers keeps it so",
            where="--quantize",
            remedy="name the model whose weights are not quantised, or leave the flag out",
        )
    if found.quantize is None:
        return found
    packed = isinstance(found.quantize, PackedWeights)
    why = why_not_quantized(spec)
    if not why and not adapters:
        why = "--lora-rank is not given: transformers trains adapters alone over such a base"
    elif not why and packed and any(len(tensor.shape) == 3 for tensor, _ in spec.tensor_groups()):
        why = "experts lie in parameters of three dimensions"
    elif not why and not (QUANTIZED_BASE.takes_packed(engine, found.method) if packed else QUANTIZED_BASE.taken_by(engine)):
        why = "this engine models no such base"
    if not why:
        return found
    says = f"the checkpoint's weights are kept in {found.quantize}, and 16 bits are counted, since {why}"
    return Checkpoint(found.method, None, (Unmodelled(KEY, Effect.UNKNOWN, says),))


def _left_out(method: str) -> Unmodelled:
    counted = f"the checkpoint's weights are quantised ({method or 'by a method that it does not name'})"
    if method in _TRAINABLE:
        says = (
            f"{counted}: {method}'s kernels and their copies of weights are not modelled; a dequantised checkpoint is counted"
        )
        return Unmodelled(KEY, Effect.UNKNOWN, says)
    if method in _DEQUANTIZED:
        says = f"{counted}: transformers trains it dequantised alone, which is counted"
        return Unmodelled(KEY, Effect.LESS, says)
    why = "transformers trains nothing over them" if method in _FOR_INFERENCE else "transformers knows no such method"
    return Unmodelled(KEY, Effect.UNKNOWN, f"{counted}: {why}; those of the checkpoint that they were made of are counted")


def _packed(method: str, said: Mapping[str, Any]) -> Checkpoint:
    """Return the base that GPTQ or AWQ keeps, where one rule holds for all linear layers but the head."""
    bits, group = said.get("bits", said.get("w_bit", 4)), said.get("group_size", said.get("q_group_size", 128))
    skipped = said.get("modules_to_not_convert")
    rules = [key for key in ("modules_in_block_to_quantize", "dynamic", "lm_head") if said.get(key)]
    rules += ["modules_to_not_convert"] if skipped not in (None, [], ["lm_head"]) else []
    packed = str(said.get("checkpoint_format") or said.get("version") or said.get("format") or method).lower()
    plain = packed in ("gptq", "gptq_v2", "gemm", "awq")
    known = type(bits) is int and bits in ((2, 3, 4, 8) if method == "gptq" else (4,)) and type(group) is int and group >= -1
    if not known or not group or not plain or rules:
        why = f"{rules[0]} makes rules for single layers" if rules else "its bits, groups or packing are not modelled"
        says = f"the checkpoint's weights are quantised ({method}): {why}; a dequantised checkpoint is counted"
        return Checkpoint(method, None, (Unmodelled(KEY, Effect.UNKNOWN, says),))
    return Checkpoint(method, PackedWeights(method, bits, group))


def _torchao(said: Mapping[str, Any]) -> Checkpoint:
    """Return the base that torchao keeps in int8 with a scale for each row; other types and granularities are named.

    transformers trains over types alone whose name has an 8, and peft's adapters refuse ``Int4Tensor``.
    Source: transformers 5.17, ``quantizers/quantizer_torchao.py`` (``is_trainable``); peft 0.21, ``tuners/lora/torchao.py``.
    """
    types = said.get("quant_type")
    kind = types.get("default") if isinstance(types, Mapping) else types
    fields = kind.get("_data") if isinstance(kind, Mapping) else None
    name = str(kind.get("_type") if isinstance(kind, Mapping) else kind)[:60]
    rows = fields.get("granularity") if isinstance(fields, Mapping) else None
    by_rows = rows is None or (isinstance(rows, Mapping) and rows.get("_type") == "PerRow")
    grouped = isinstance(fields, Mapping) and fields.get("group_size") is not None
    alone = not isinstance(types, Mapping) or len(types) == 1
    skipped = said.get("modules_to_not_convert")
    counted = "a dequantised checkpoint is counted"
    plain = re.sub(r"[_\W]|config$", "", name.lower())
    usual = skipped in (None, [], ["lm_head"]) and not said.get("include_input_output_embeddings")
    if plain == "int8weightonly" and alone and by_rows and not grouped and usual:
        return Checkpoint(_TORCHAO, PackedWeights(_TORCHAO, 8, -1))
    why = f"{name} with these granularities and modules is not modelled"
    if "8" not in name:
        why = (
            f"{name} is trained by nothing: transformers trains over torchao's 8 bits alone, and peft refuses its 4-bit tensors"
        )
    says = f"the checkpoint's weights are quantised (torchao): {why}; {counted}"
    return Checkpoint(_TORCHAO, None, (Unmodelled(KEY, Effect.UNKNOWN, says),))


def _bitsandbytes(said: Mapping[str, Any], bits: int | None) -> Checkpoint:
    """Return the base that bitsandbytes keeps, as far as it is modelled: the usual skipped layers, products in 16 bits."""
    skipped = said.get("llm_int8_skip_modules")
    unknown = ""
    if skipped not in (None, [], ["lm_head"]):
        unknown = "llm_int8_skip_modules keeps some layers in 16 bits"
    elif bits == 4 and _plain(said.get("bnb_4bit_compute_dtype")) not in _HALF:
        unknown = "bnb_4bit_compute_dtype, float32 unless it is given, makes 32-bit copies of weights"
    elif bits == 8 and said.get("llm_int8_has_fp16_weight"):
        unknown = "llm_int8_has_fp16_weight keeps weights in 16 bits"
    levels = str(said.get("bnb_4bit_quant_type") or "fp4").lower()
    if bits == 8:
        name = Quantization.INT8.value
    else:
        name = levels if said.get("bnb_4bit_use_double_quant") else f"{levels}-single"
    if bits is None or name not in list(Quantization):
        unknown = "neither load_in_4bit nor load_in_8bit is true" if bits is None else f"no such levels: {levels[:20]}"
    if unknown:
        says = f"the checkpoint's weights are quantised (bitsandbytes), and {unknown}; those of a dequantised one are counted"
        return Checkpoint(_BITSANDBYTES, None, (Unmodelled(KEY, Effect.UNKNOWN, says),))
    in_bytes = bits == 4 and _plain(said.get("bnb_4bit_quant_storage") or "uint8") in ("uint8", "int8")
    return Checkpoint(_BITSANDBYTES, Quantization(name), in_bytes=in_bytes)


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
