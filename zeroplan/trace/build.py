"""Models and inputs on the meta device, with as few blocks as show the pattern of their depth."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import (
    AUDIO_CLASSIFICATION,
    CTC,
    IMAGE_CLASSIFICATION,
    IMAGE_TEXT_TO_TEXT,
    MULTIPLE_CHOICE,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFICATION,
    SPEECH_SEQ2SEQ,
    labels_of,
    text_config,
)
from zeroplan.core.workload import Attention
from zeroplan.tape.options import AdaptingTechnique, Arithmetic, Checkpointing, FreezingTechnique, TracedTechnique, TraceOptions
from zeroplan.trace.attention import FLASH, register_flash
from zeroplan.trace.compiled_float8 import multiply_in_float8
from zeroplan.trace.fit import TracePoint
from zeroplan.trace.float8 import convert
from zeroplan.trace.media import Medium, media_inputs
from zeroplan.trace.pair_loss import pairs_of
from zeroplan.trace.quantized import adapt, quantize, quantize_experts
from zeroplan.trace.quiet import errors_alone
from zeroplan.trace.sparse_attention import register_sparse
from zeroplan.trace.tiled import tile_mlps
from zeroplan.trace.tiled_loss import tile_loss

#: Config keys that hold a number of blocks.
_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
)
#: Config keys that name blocks as a backbone's stages.
_STAGES = ("stage_names", "out_features", "out_indices")
#: Config keys of the period at which blocks are of another kind.
_PERIODS = (
    "decoder_sparse_step",
    "moe_layer_freq",
    "interleave_moe_layer_step",
    "sliding_window_pattern",
    "moe_every_n_layers",
)
#: Config keys of the number of blocks before that pattern begins.
_PREFIXES = ("first_k_dense_replace", "first_dense_layers", "num_dense_layers", "n_dense_first_layers")
#: Heads with which Longformer marks tokens of its own for global attention.
_MARKED = (SEQUENCE_CLASSIFICATION, QUESTION_ANSWERING, MULTIPLE_CHOICE)
_ATTENTION = {Attention.SDPA: "sdpa", Attention.EAGER: "eager", Attention.FLASH: FLASH}


@dataclass(slots=True)
class Depth:
    """One number of blocks in a config: the keys that lead to it, its real value, the number of blocks to trace, and after how
    many their pattern comes again.
    """

    path: tuple[str, ...]
    real: int
    traced: int
    period: int = 1


def depths_of(config: Mapping[str, Any], *, extra: int = 0, every: int = 1, ends: int = 0) -> list[Depth]:
    """Return the number of blocks to trace in each stack: another in each that is really of another depth.

    Args:
        config: the config, with transformers' defaults.
        extra: periods to trace beyond the two that usually show the pattern.
        every: k where only each k-th block is checkpointed, else 1.
        ends: blocks at both ends that are of another kind.
    """
    found: list[Depth] = []
    _find_depths(config, (), extra, every, ends, found)
    lengths: dict[int, int] = {}  # what stack a traced length tells of, by its real depth
    for depth in sorted(found, key=lambda depth: depth.real):
        while lengths.setdefault(depth.traced, depth.real) != depth.real:
            depth.traced = min(depth.real, depth.traced + depth.period)
    return found


def _find_depths(
    config: Mapping[str, Any], path: tuple[str, ...], extra: int, every: int, ends: int, found: list[Depth]
) -> None:
    for key in _DEPTHS:
        real = config.get(key)
        if isinstance(real, int) and not isinstance(real, bool):
            prefix, period = _pattern(config, real)
            period = math.lcm(period, every)
            traced = prefix + ends + 2 + (2 + extra) * period
            traced += (real - traced) % period
            found.append(Depth((*path, key), real, min(real, traced), period))
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            _find_depths(value, (*path, key), extra, every, ends, found)


def _pattern(config: Mapping[str, Any], depth: int) -> tuple[int, int]:
    """Find the number of blocks before the pattern begins, and its period, from known keys and from lists with one entry a
    block.
    """
    columns: list[Any] = [v for v in config.values() if isinstance(v, list) and len(v) == depth and depth > 1]
    columns += [[v.get(i, v.get(str(i))) for i in range(depth)] for v in config.values() if _by_block(v, depth)]
    kinds = [tuple(str(c[i]) for c in columns) for i in range(depth)]
    prefix = max((int(config[k]) for k in _PREFIXES if isinstance(config.get(k), int)), default=0)
    period = 1
    for key in _PERIODS:
        if isinstance(config.get(key), int) and config[key] > 1:
            period = max(period, int(config[key]))
    for p in range(period, max(period, depth // 2) + 1):
        for a in range(prefix, min(prefix + 4, depth)):
            if all(kinds[i] == kinds[i + p] for i in range(a, depth - p)):
                return a, p
    return depth, 1


def _by_block(value: Any, depth: int) -> bool:
    """Return whether a value of a config maps some blocks' numbers to the settings that differ there, as Gemma 4's does.

    ``id2label`` maps numbers too, to names of classes.
    """
    settings = isinstance(value, Mapping) and bool(value) and all(isinstance(one, Mapping) for one in value.values())
    return settings and all(str(key).isdigit() and int(key) < depth for key in value)


#: Config keys of sequence lengths beyond which a model may run other operators.
_THRESHOLDS = (
    "sliding_window",
    "local_attention",
    "attention_window",
    "attention_chunk_size",
    "original_max_position_embeddings",
)


def thresholds(config: Mapping[str, Any]) -> list[int]:
    """Sequence lengths from which the model may run other operators: each window of the config, and one more."""
    found: list[int] = []
    for key, value in sorted(config.items()):
        if isinstance(value, Mapping):
            found += thresholds(value)
        elif key in _THRESHOLDS and isinstance(value, int) and value > 1:
            found += [value // 2, value // 2 + 1] if key == "local_attention" else []
            found += [value, value + 1]
    return found


def shorten(config: dict[str, Any], depths: Sequence[Depth]) -> dict[str, Any]:
    """The config with only the traced blocks; lists with one entry a block are cut to the same length."""
    out = copy.deepcopy(config)
    for depth in depths:
        inner = out
        for key in depth.path[:-1]:
            inner = inner[key]
        inner[depth.path[-1]] = depth.traced
        for key, value in inner.items():
            if isinstance(value, list) and len(value) == depth.real:
                inner[key] = value[: depth.traced]
        for key in _STAGES:  # of a backbone, whose stages are the blocks: they follow from their number
            inner.pop(key, None)
    return out


def full_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the defaults that transformers gives it, such as the kinds of layers.

    Raises:
        BadInput: when transformers does not know the architecture.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {k: v for k, v in config.items() if k not in ("auto_map", "quantization_config", "torch_dtype", "dtype")}
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise BadInput(
            f"transformers {transformers.__version__} knows no model_type {str(model_type)[:60]!r}",
            remedy="install a newer transformers",
        )
    with errors_alone():
        built = transformers.AutoConfig.for_model(model_type, **values).to_dict()
    # Names that a config class translates must not stand twice, or the second would undo a shortening.
    kept = {k: v for k, v in built.items() if v is not None or k in values} | {"model_type": model_type}
    if values.get("tie_word_embeddings") is False:
        kept["tie_word_embeddings"] = False  # T5's config class says True whatever it is told
    return kept


def build_model(config: Mapping[str, Any], auto_class: str, options: TraceOptions, rank: int) -> nn.Module:
    """Build the model on the meta device, in training or evaluation mode, ready to run as `options` say.

    A `rank` of 0 means no LoRA.

    Raises:
        BadInput: when transformers has no FlashAttention for it and `options` ask for that.
    """
    import transformers

    values = dict(config)
    with errors_alone():
        built = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    if built.is_encoder_decoder and getattr(built, "decoder_start_token_id", None) is None:
        built.decoder_start_token_id = 0  # labels are shifted by one; the token itself changes no shape
    if auto_class == SEQUENCE_CLASSIFICATION and getattr(built, "pad_token_id", None) is None:
        built.pad_token_id = 0  # a decoder's classifier asks for one to find the last token of each sequence
    dtype = torch.bfloat16 if options.arithmetic.half_model else torch.float32
    attention = _ATTENTION[options.attn] if options.sparse is None else register_sparse(options.sparse)
    model = _with_attention(getattr(transformers, auto_class), built, dtype, attention)
    model.to("meta")  # some make a parameter by torch.Tensor(n), which no device's context reaches
    model.tie_weights()
    if config.get("tie_word_embeddings") is False:
        _untie(model)
    if options.base is not None:
        quantize(model, options.base.products)
        if options.base.linear_experts:
            quantize_experts(model, options.base.products)
    if options.lora is not None:
        fp32 = options.arithmetic is Arithmetic.HALF_AUTOCAST
        model = with_adapters(model, rank, options.lora, fp32=fp32, dropout=options.lora_dropout, techniques=options.techniques)
    if options.base is not None:
        adapt(model, autocast=options.arithmetic.autocasts, half=options.base.half_adapters)
    if options.fp8 is not None:
        convert(model, options.fp8, autocasts=options.arithmetic.autocasts)
    if options.tiles.mlp:
        tile_mlps(model, options.tiles.mlp)
    if options.tiles.loss:
        tile_loss(model, options.tiles.loss)
    for one in options.techniques:
        if isinstance(one, FreezingTechnique):
            one.freeze(model, autocast=options.arithmetic is Arithmetic.HALF_AUTOCAST)
    keep_layers(model)
    trained: nn.Module = model.train(not options.evaluation)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.config.use_cache = False
    if options.graphs is not None:
        without_cache(base)
        if options.graphs.float8 is not None:
            multiply_in_float8(base, options.graphs.float8, options.graphs.bf16_layers)
    if options.checkpointing is not Checkpointing.NONE and options.lora is not None:
        base.enable_input_require_grads()
    return trained


def keep_layers(model: nn.Module) -> None:
    """Switch LayerDrop off. What it leaves out is drawn at each step, and a step that leaves out nothing takes the most."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name in [name for name in getattr(holder, "__dict__", ()) if name.endswith("layerdrop")]:
                setattr(holder, name, 0.0)


def without_cache(model: nn.Module) -> None:
    """Switch the key-value cache off in every stack. T5's decoder has a copy of the config, so it caches even where the model's
    own says not to; each of its blocks would then be another graph, since a cache is filled by the block's number.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _with_attention(made: Any, config: Any, dtype: torch.dtype, attention: str) -> Any:
    """Build a model of a class on the meta device, with eager attention where it has no other.

    Raises:
        BadInput: when it has no FlashAttention and is asked for it.
    """
    from transformers.initialization import no_init_weights

    if attention == FLASH:
        register_flash()
    with errors_alone(), torch.device("meta"), no_init_weights():
        try:
            model = made.from_config(config, dtype=dtype, attn_implementation=attention)
        except ValueError:
            if attention != "sdpa":
                raise
            model = made.from_config(config, dtype=dtype, attn_implementation="eager")  # all that some models have
        except KeyError:  # from a table of the model's own, which holds transformers' names alone
            if attention != FLASH:
                raise
            raise _no_flash(config) from None
    if attention == FLASH and not model._supports_flash_attn:
        raise _no_flash(config)
    return model


def _no_flash(config: Any) -> BadInput:
    return BadInput(f"{config.model_type} has no FlashAttention that can be traced", where="--attn", remedy="use sdpa")


def _untie(model: Any) -> None:
    """Give the head its own matrix, as loading a checkpoint that holds one does."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and embedding is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(torch.empty_like(embedding.weight))


def with_adapters(
    model: Any,
    rank: int,
    targets: Sequence[str],
    *,
    fp32: bool = False,
    dropout: bool = False,
    techniques: Sequence[TracedTechnique] = (),
) -> Any:
    """Add peft's LoRA adapters to the model, in its own dtype or in `fp32`, as modules trained whole beside them; no `targets`:
    all linear layers of the blocks.

    With `dropout` they drop some of their input; how much changes no size. `techniques` change the arguments of ``LoraConfig``.
    """
    from peft import LoraConfig, get_peft_model

    wanted: Any = list(targets) or "all-linear"
    config: dict[str, Any] = {"r": rank, "lora_alpha": 32, "target_modules": wanted, "lora_dropout": 0.05 if dropout else 0.0}
    for one in techniques:
        config = one.adapted(config) if isinstance(one, AdaptingTechnique) else config
    lora = LoraConfig(**config)
    with warnings.catch_warnings():
        # peft warns about merging and saving adapters, which nobody does with these.
        warnings.simplefilter("ignore", UserWarning)
        adapted = get_peft_model(model, lora, autocast_adapter_dtype=fp32)
    for parameter in adapted.parameters() if fp32 else ():  # modules trained whole, too
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return adapted


def vocabulary_of(config: Mapping[str, Any]) -> int:
    """Return the size of the vocabulary; 0 for a model without one."""
    return int(config.get("vocab_size") or text_config(config).get("vocab_size") or 0)


def build_inputs(
    config: Mapping[str, Any], auto_class: str, options: TraceOptions, point: TracePoint, media: Sequence[Medium] = ()
) -> dict[str, Any]:
    """Make one micro batch on the meta device, with `media` in each sample. A language model's labels are its ids."""
    dtype = torch.bfloat16 if options.arithmetic.half_model else torch.float32

    def tokens(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    if config.get("attention_window") and auto_class in _MARKED and not ends_samples(config):
        raise BadInput(f"{auto_class} of {config['model_type']} attends globally to tokens that it marks, which no trace knows")
    if media:
        made = media_inputs(media, point.batch, point.seq, dtype)
        return {name: tensor.to("meta") for name, tensor in made.items()}
    if auto_class == IMAGE_CLASSIFICATION:
        size = config.get("image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.empty(point.batch, config.get("num_channels", 3), height, width, dtype=dtype, device="meta")
        return {"pixel_values": pixels, "labels": tokens(point.batch)}
    if auto_class == SPEECH_SEQ2SEQ:
        frames = 2 * int(config.get("max_source_positions", 1500))
        features = torch.empty(point.batch, config.get("num_mel_bins", 80), frames, dtype=dtype, device="meta")
        return {"input_features": features, "labels": tokens(point.batch, point.seq)}
    if auto_class in (CTC, AUDIO_CLASSIFICATION):
        return _audio(config, auto_class, point, dtype)
    if auto_class == MULTIPLE_CHOICE:
        return {"input_ids": tokens(point.batch, 2, point.seq), "labels": tokens(point.batch)}
    if options.pairs is not None:
        return {**pairs_of(point.batch, point.seq)}
    ids = tokens(point.batch, point.seq)
    if auto_class == IMAGE_TEXT_TO_TEXT and config.get("model_type") == "gemma3":
        return {"input_ids": ids, "token_type_ids": tokens(point.batch, point.seq), "labels": ids}
    if auto_class == SEQUENCE_CLASSIFICATION:
        labels = torch.empty(point.batch, dtype=dtype, device="meta") if labels_of(config) == 1 else tokens(point.batch)
        return {"input_ids": _ended(config, point) if ends_samples(config) else ids, "labels": labels}
    if auto_class == QUESTION_ANSWERING:
        return {"input_ids": ids, "start_positions": tokens(point.batch), "end_positions": tokens(point.batch)}
    if options.target_len:
        return {"input_ids": ids, "labels": tokens(point.batch, options.target_len)}
    return {"input_ids": ids, "labels": ids}


def ends_samples(config: Mapping[str, Any]) -> bool:
    """Return whether a model's classifier looks for the last token of each sample by its value, as BART's and T5's do."""
    return bool(config.get("is_encoder_decoder"))


def _ended(config: Mapping[str, Any], point: TracePoint) -> torch.Tensor:
    """Return tokens with values, of which the last of each sample ends it (:mod:`zeroplan.trace.known`)."""
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    ids = torch.full((point.batch, point.seq), 3 if end != 3 else 4, dtype=torch.int64)
    ids[:, -1] = end if isinstance(end, int) else 0
    return ids.to("meta")


def _audio(config: Mapping[str, Any], auto_class: str, point: TracePoint, dtype: torch.dtype) -> dict[str, Any]:
    """Sound as its model type takes it: samples, or frames of a spectrogram. A position is 20 ms of it, 320 samples."""
    bins = next((int(config[key]) for key in ("num_mel_bins", "input_feat_per_channel") if key in config), 0)
    labels = (point.batch,) if auto_class == AUDIO_CLASSIFICATION else (point.batch, max(1, point.seq // 8))
    made: dict[str, Any] = {"labels": torch.empty(labels, dtype=torch.int64, device="meta")}
    if "max_length" in config and bins:  # the audio spectrogram transformer's images
        return made | {"input_values": torch.empty(point.batch, config["max_length"], bins, dtype=dtype, device="meta")}
    if "max_source_positions" in config and bins:
        frames = 2 * int(config["max_source_positions"])
        return made | {"input_features": torch.empty(point.batch, bins, frames, dtype=dtype, device="meta")}
    if bins or "feature_projection_input_dim" in config:
        width = bins or int(config["feature_projection_input_dim"])
        return made | {"input_features": torch.empty(point.batch, point.seq, width, dtype=dtype, device="meta")}
    return made | {"input_values": torch.empty(point.batch, 320 * point.seq, dtype=dtype, device="meta")}
