"""Models of images, videos and sound: what a trace without values finds, beside what a real run on the CPU saves."""

from __future__ import annotations

import importlib
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Attention, Media
from zeroplan.tape.expanded import Mark, Op
from zeroplan.tape.options import Arithmetic, TraceOptions
from zeroplan.trace.api import trace_at
from zeroplan.trace.fit import TracePoint
from zeroplan.trace.media import Medium, media_inputs, media_of

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_GRID = {"depth": 3, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
_SQUARE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
_SOUND = {
    "d_model": 64,
    "hidden_size": 64,
    "intermediate_size": 256,
    "encoder_layers": 2,
    "num_hidden_layers": 2,
    "encoder_attention_heads": 4,
    "num_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "num_mel_bins": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**_TEXT, "vocab_size": 152000, "rope_parameters": _MROPE},
        "vision_config": {"depth": 3, "embed_dim": 64, "hidden_size": 64, "num_heads": 4},
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "vocab_size": 152000, "rope_parameters": _MROPE},
        "vision_config": {**_GRID, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "vocab_size": 152000, "rope_parameters": _MROPE},
        "vision_config": {**_GRID, "deepstack_visual_indexes": [0, 1]},
    },
    "glm4v": {"text_config": {**_TEXT, "vocab_size": 152000, "rope_parameters": _MROPE}, "vision_config": _GRID},
    "gemma3": {
        "text_config": {**_TEXT, "vocab_size": 262208},
        "vision_config": {**_SQUARE, "image_size": 56, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama", "vocab_size": 33000},
        "vision_config": {**_SQUARE, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2", "vocab_size": 151700},
        "vision_config": {**_SQUARE, "image_size": [56, 56], "patch_size": [14, 14]},
    },
    "idefics3": {  # images of each sample in a dimension of their own
        "text_config": {**_TEXT, "model_type": "llama", "vocab_size": 33000},
        "vision_config": {**_SQUARE, "image_size": 64, "patch_size": 16},
        "image_token_id": 32000,
        "scale_factor": 2,
    },
    "mistral3": {  # whole sizes of images
        "text_config": {**_TEXT, "model_type": "mistral", "vocab_size": 33000},
        "vision_config": {**_SQUARE, "model_type": "pixtral", "head_dim": 16, "image_size": 56, "patch_size": 14},
        "spatial_merge_size": 2,
    },
    "llava_next_video": {  # frames in a dimension of their own
        "text_config": {**_TEXT, "model_type": "llama", "vocab_size": 33000},
        "vision_config": {**_SQUARE, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
    },
    "llava_onevision": {  # a token behind a video
        "text_config": {**_TEXT, "model_type": "qwen2", "vocab_size": 151700},
        "vision_config": {**_SQUARE, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
    },
    "voxtral": {
        "text_config": {**_TEXT, "model_type": "llama", "vocab_size": 33000},
        "audio_config": {**_SOUND, "max_source_positions": 40},
        "audio_token_id": 24,
    },
    "qwen2_audio": {  # without get_audio_features
        "text_config": {**_TEXT, "model_type": "qwen2", "vocab_size": 156100},
        "audio_config": {**_SOUND, "max_source_positions": 160},
    },
    "qwen2_5_omni_thinker": {  # sound as long as it is
        "text_config": {**_TEXT, "vocab_size": 152000, "rope_parameters": _MROPE},
        "audio_config": {**_SOUND, "output_dim": 64, "n_window": 20},
        "vision_config": {**_GRID, "fullatt_block_indexes": [1]},
    },
    "granite_speech": {
        "text_config": {**_TEXT, "model_type": "granite", "vocab_size": 50000},
        "encoder_config": {"hidden_dim": 64, "num_layers": 2, "num_heads": 4, "dim_head": 16, "dropout": 0.0},
        "projector_config": {
            "hidden_size": 64,
            "encoder_hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    },
}
#: Models whose towers cut an image into patches of its own size.
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
SOUND = ("voxtral", "qwen2_audio", "qwen2_5_omni_thinker", "granite_speech")
VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next_video", "llava_onevision")
#: A model and what comes with each of its samples.
CASES = [
    *((kind, Media(2, 112 if kind in GRIDS else None)) for kind in MODELS if kind not in (*SOUND, *VIDEO[3:])),
    *((kind, Media(1, 56 if kind in GRIDS else None, video_frames=4)) for kind in VIDEO),
    *((kind, Media(audio_seconds=2)) for kind in SOUND),
]
_SAMPLES = 2


def _config(kind: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **MODELS[kind])
    config.use_cache = False
    return config


def _class_of(kind: str) -> str:
    return "AutoModelForMultimodalLM" if kind in SOUND else "AutoModelForImageTextToText"


def _model(kind: str, **how: Any) -> Any:
    return getattr(importlib.import_module("transformers"), _class_of(kind)).from_config(_config(kind), **how)


def _media(kind: str, media: Media) -> tuple[Medium, ...]:
    with torch.device("meta"):
        model = _model(kind)
    return media_of(model, _config(kind).to_dict(), media)


def _saved_by_the_cpu(kind: str, media: tuple[Medium, ...], length: int) -> Counter[int]:
    """Bytes of the storages that a real forward keeps for its backward, weights left out."""
    model = _model(kind, attn_implementation="eager").train()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: list[weakref.ref[Any]] = []  # a tower's last block may run for nothing, and its storages go with its output

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(tensor.untyped_storage()))
        return tensor.detach()  # an output that saved itself would never go

    inputs = media_inputs(media, _SAMPLES, length, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    assert torch.isfinite(loss)
    own |= {t.untyped_storage().data_ptr() for t in inputs.values()}
    alive = {storage.data_ptr(): storage.nbytes() for storage in (ref() for ref in kept) if storage is not None}
    return Counter(size for place, size in alive.items() if place not in own)


def _alive_in_the_trace(kind: str, media: Media, length: int) -> Counter[int]:
    """Bytes of the storages that are alive at the end of the traced forward, the batch left out."""
    options = TraceOptions(attn=Attention.EAGER, arithmetic=Arithmetic.FP32, media=media)
    tape = trace_at({"model_type": kind, **MODELS[kind]}, _class_of(kind), options, TracePoint(_SAMPLES, length))
    stream = tape.expand(_SAMPLES, length)
    alive: dict[int, int] = {}
    begun = False
    for op, arg, aux in zip(stream.op, stream.arg, stream.aux, strict=True):
        if op == Op.ALLOC and begun:
            alive[arg] = aux
        elif op == Op.FREE:
            alive.pop(arg, None)
        elif op == Op.MARK:
            begun = begun or arg == Mark.FORWARD_BEGIN
            if arg == Mark.FORWARD_END:
                break
    return Counter(alive.values())


@pytest.mark.parametrize(("kind", "media"), CASES)
def test_a_trace_keeps_what_a_real_forward_saves(kind: str, media: Media) -> None:
    taken = _media(kind, media)
    length = sum(one.count * one.length for one in taken) + 20
    real, traced = _saved_by_the_cpu(kind, taken, length), _alive_in_the_trace(kind, media, length)
    assert not real - traced
    # Alive and not saved: the loss, and the positions' offsets that models with grids note for generation.
    assert sorted((traced - real).elements()) == ([4, 8 * _SAMPLES] if kind in GRIDS else [4])


def test_a_video_has_its_frames_tokens_and_sound_those_of_its_seconds() -> None:
    def tokens(kind: str, media: Media) -> list[tuple[int, int, int]]:
        return [(one.count, one.tokens, one.parts) for one in _media(kind, media)]

    assert tokens("qwen2_5_vl", Media(2, 112, video_frames=8)) == [(2, 4 * 16, 1)]
    assert tokens("qwen3_vl", Media(1, 112, video_frames=8)) == [(1, 4 * 16 * 16 // 16, 4)]
    assert tokens("llava_onevision", Media(1, video_frames=4)) == [(1, 4 * 4 + 1, 1)]
    assert tokens("voxtral", Media(audio_seconds=2)) == [(3, 10, 1)]  # pieces of 0.8 s by this config
    assert tokens("qwen2_audio", Media(audio_seconds=2)) == [(1, 50, 1)]  # of 3.2 s, padded
    both = tokens("qwen2_5_omni_thinker", Media(1, 112, audio_seconds=4))
    assert both == [(1, 16, 1), (1, 100, 1)]


def test_images_that_leave_no_room_are_refused() -> None:
    with pytest.raises(BadInput, match="at least 34"):
        media_inputs(_media("qwen2_vl", Media(2, 112)), 1, 33, torch.float32)


def test_models_whose_images_or_sound_are_unknown_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match="images of  are not known"):
        media_of(torch.nn.Linear(2, 2), {"model_type": ""}, Media(1))
    with pytest.raises(BadInput, match="56 pixels"):
        _media("llava", Media(1, 112))
    with pytest.raises(BadInput, match="videos of glm4v are not known: its forward takes no such placeholders"):
        _media("glm4v", Media(1, 112, video_frames=4))
    with pytest.raises(BadInput, match="audio of llava is not known"):
        _media("llava", Media(audio_seconds=3))


def test_images_and_sound_are_planned_by_a_trace_alone() -> None:
    import zeroplan

    config = {"model_type": "qwen2_vl", **MODELS["qwen2_vl"]}
    patches = _media("qwen2_vl", Media(1, 112))[0].given["pixel_values"].shape[0]
    one, two = (zeroplan.estimate(config, stage=2, seq_len=64, images=images, image_size=112, gpus=1) for images in (1, 2))
    more = two[0].gpu.peak_allocated - one[0].gpu.peak_allocated
    assert more > 4 * patches * 64  # at least one activation of the tower
    spoken = {"model_type": "voxtral", **MODELS["voxtral"]}
    short, long = (zeroplan.estimate(spoken, stage=2, seq_len=512, audio_seconds=n, gpus=1)[0] for n in (2, 20))
    assert long.gpu.activations > short.gpu.activations
    with pytest.raises(BadInput, match="--depth"):
        zeroplan.estimate(config, images=1, depth="formula")
    with pytest.raises(BadInput, match="llama takes text alone"):
        zeroplan.estimate({"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 100}, images=1)
    with pytest.raises(BadInput, match="frames without a video"):
        zeroplan.estimate(config, video_frames=4)
