"""Vision-language models: what a trace without values finds, beside what the same model saves in a real run on the CPU."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Attention
from zeroplan.tape.expanded import Mark, Op
from zeroplan.tape.options import Arithmetic, TracedImages, TraceOptions
from zeroplan.trace.api import trace_at
from zeroplan.trace.fit import TracePoint
from zeroplan.trace.vision import Picture, image_inputs, picture_of

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
}
#: Models whose towers cut an image into patches of its own size.
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
_SAMPLES, _IMAGES = 2, 2


def _config(kind: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **MODELS[kind])
    config.use_cache = False
    return config


def _size(kind: str) -> int | None:
    return 112 if kind in GRIDS else None


def _picture(kind: str, size: int | None) -> Picture:
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(_config(kind))
    return picture_of(model, _config(kind).to_dict(), size)


def _saved_by_the_cpu(kind: str, picture: Picture, length: int) -> Counter[int]:
    """Bytes of the storages that a real forward keeps for its backward, weights left out."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(_config(kind), attn_implementation="eager").train()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: list[weakref.ref[Any]] = []  # a tower's last block may run for nothing, and its storages go with its output

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(tensor.untyped_storage()))
        return tensor.detach()  # an output that saved itself would never go

    inputs = image_inputs(picture, _SAMPLES, length, _IMAGES, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    assert torch.isfinite(loss)
    own |= {t.untyped_storage().data_ptr() for t in inputs.values()}
    alive = {storage.data_ptr(): storage.nbytes() for storage in (ref() for ref in kept) if storage is not None}
    return Counter(size for place, size in alive.items() if place not in own)


def _alive_in_the_trace(kind: str, length: int) -> Counter[int]:
    """Bytes of the storages that are alive at the end of the traced forward, the batch left out."""
    options = TraceOptions(attn=Attention.EAGER, arithmetic=Arithmetic.FP32, images=TracedImages(_IMAGES, _size(kind)))
    tape = trace_at({"model_type": kind, **MODELS[kind]}, "AutoModelForImageTextToText", options, TracePoint(_SAMPLES, length))
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


@pytest.mark.parametrize("kind", MODELS)
def test_a_trace_keeps_what_a_real_forward_saves(kind: str) -> None:
    picture = _picture(kind, _size(kind))
    length = _IMAGES * (picture.tokens + 1) + 20
    real, traced = _saved_by_the_cpu(kind, picture, length), _alive_in_the_trace(kind, length)
    assert not real - traced
    # Alive and not saved: the loss, and the positions' offsets that models with grids note for generation.
    assert sorted((traced - real).elements()) == ([4, 8 * _SAMPLES] if kind in GRIDS else [4])


def test_images_that_leave_no_room_are_refused() -> None:
    with pytest.raises(BadInput, match="at least 34"):
        image_inputs(_picture("qwen2_vl", 112), 1, 33, 2, torch.float32)


def test_models_whose_images_are_unknown_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match="images of  are not known"):
        picture_of(torch.nn.Linear(2, 2), {"model_type": ""}, None)
    with pytest.raises(BadInput, match="56 pixels"):
        _picture("llava", 112)


def test_images_are_planned_by_a_trace_alone() -> None:
    import zeroplan

    config = {"model_type": "qwen2_vl", **MODELS["qwen2_vl"]}
    patches = _picture("qwen2_vl", 112).pixels[0]
    one, two = (zeroplan.estimate(config, stage=2, seq_len=64, images=images, image_size=112, gpus=1) for images in (1, 2))
    more = two[0].gpu.peak_allocated - one[0].gpu.peak_allocated
    assert more > 4 * patches * 64  # at least one activation of the tower
    with pytest.raises(BadInput, match="--depth"):
        zeroplan.estimate(config, images=1, depth="formula")
    with pytest.raises(BadInput, match="images of llama"):
        zeroplan.estimate({"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 100}, images=1)
