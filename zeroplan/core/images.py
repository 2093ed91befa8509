"""Batches of tokens with images, for vision-language models: the shapes that their processors give, without a processor.

An image is a square of ``size`` pixels. Each stands in the text as a run of placeholder tokens, which the model replaces by the
vision tower's output. Source: transformers 5.17, ``image_processing_*.py`` and ``processing_*.py`` of each model type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput

#: Model types that cut an image into patches of its own size (``pixel_values`` [patches, values of one], ``image_grid_thw``).
GRID_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe")
#: Model types whose images are scaled to one size (``pixel_values`` [images, channels, height, width]).
SQUARE_TYPES = ("gemma3", "llava", "paligemma", "internvl")


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """What one sample's images add to a batch.

    Attributes:
        tokens: placeholder tokens of each image.
        token_id: the placeholder.
        pixels: the shape of ``pixel_values`` for all images of a micro batch.
        grid: patches of one image by time, height and width; None where the model takes none.
        marks: the name of the argument that tells image tokens from text; None where there is none.
    """

    tokens: int
    token_id: int
    pixels: tuple[int, ...]
    grid: tuple[int, int, int] | None = None
    marks: str | None = None


def require_images(kind: str) -> None:
    """Raise BadInput, which names the model types that take images, for another one."""
    if kind not in (*GRID_TYPES, *SQUARE_TYPES):
        known = ", ".join((*GRID_TYPES, *SQUARE_TYPES))
        raise BadInput(f"images of {kind} are not known", where="--images", remedy=f"known are {known}")


def image_batch(config: Mapping[str, Any], samples: int, images: int, size: int | None) -> ImageBatch:
    """Return the shapes of a micro batch with `images` images of `size` pixels in each of its samples.

    Args:
        config: the model's config, with transformers' defaults.
        images: images of one sample, above 0.
        size: pixels of a side; None for the size that the config names.

    Raises:
        BadInput: a model type whose images are not known here, or a size that it does not take.
    """
    kind, vision = str(config.get("model_type")), config.get("vision_config")
    require_images(kind)
    if not isinstance(vision, Mapping):
        raise BadInput(f"this config of {kind} has no vision_config", where="--images", remedy="give the whole config")
    if kind in GRID_TYPES:
        patch, merge = int(vision["patch_size"]), int(vision["spatial_merge_size"])
        # The processor rounds each side to whole merged patches.
        side = max(1, round((size or 448) / (patch * merge))) * merge
        values = int(vision.get("in_channels") or vision.get("in_chans") or 3) * int(vision["temporal_patch_size"]) * patch**2
        patches = side * side
        return ImageBatch(
            patches // merge**2,
            int(config["image_token_id"]),
            (samples * images * patches, values),
            (1, side, side),
            "mm_token_type_ids",
        )
    own = vision["image_size"]
    own = own[0] if isinstance(own, list | tuple) else own
    if size is not None and size != own:
        raise BadInput(f"{kind} scales every image to {own} pixels", where="--image-size", remedy="leave it out")
    pixels = (samples * images, int(vision.get("num_channels", 3)), own, own)
    return ImageBatch(_placeholders(config, vision, own), _token_id(config), pixels, None, _marks(kind))


def _placeholders(config: Mapping[str, Any], vision: Mapping[str, Any], size: int) -> int:
    """Return the number of tokens that stand for one image."""
    if config["model_type"] == "gemma3":
        return int(config["mm_tokens_per_image"])
    patch = vision["patch_size"]
    side = size // int(patch[0] if isinstance(patch, list | tuple) else patch)
    if config["model_type"] == "internvl":
        return int((side * float(config["downsample_ratio"])) ** 2)
    whole = config.get("vision_feature_select_strategy") == "full"  # LLaVA's keeps the class token
    return side * side + int(whole)


def _token_id(config: Mapping[str, Any]) -> int:
    return int(config["image_token_index"] if "image_token_index" in config else config["image_token_id"])


def _marks(kind: str) -> str | None:
    return "token_type_ids" if kind in ("gemma3", "paligemma") else None
