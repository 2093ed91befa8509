"""Micro batches with images, for any model of transformers whose ``get_image_features`` says what it takes.

Note [What an image becomes]
    An image is a square. Its pixels have the shape that the model takes: patches with their numbers by time, height and width
    (``image_grid_thw``), or one tensor of the size that the config's tower has, with its sizes where they are asked for. How
    many tokens stand for it in the text is the number of features that the model's own ``get_image_features`` returns for it,
    which a processor counts by formulas of its own. A processor that cuts an image into tiles gives the model one image a tile.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan.trace.functions import CudaFunctions
from zeroplan.trace.known import KnownValues
from zeroplan.trace.recorder import StorageRecorder

_WHERE = "--images"
#: What ``get_image_features`` may ask for, beside what has a default.
_TAKEN = {"pixel_values", "image_grid_thw", "image_sizes"}
#: Config keys of the tiles into which a processor cuts an image by its size.
_TILED = "image_grid_pinpoints"
_GRID_SIZE = 448  # pixels of a side, where the model takes any


@dataclass(frozen=True, slots=True)
class Picture:
    """One image as a model takes it. See Note [What an image becomes].

    Attributes:
        pixels: the shape of its ``pixel_values``: [channels, height, width], or [patches, values of one].
        by_sample: images have a dimension of their own behind the samples'.
        grid: patches by time, height and width; None where the model takes none.
        size: pixels of a side where the model asks for them; else None.
        token_id: the placeholder in the text.
        marks: the argument of the forward that tells image tokens from text; None where there is none.
        tokens: placeholder tokens of the image.
    """

    pixels: tuple[int, ...]
    by_sample: bool
    grid: tuple[int, int, int] | None
    size: int | None
    token_id: int
    marks: str | None
    tokens: int

    def arguments(self, samples: int, images: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return what tells the model of `images` images of noise in each of `samples` samples."""
        count = samples * images
        shape = (count * self.pixels[0], *self.pixels[1:]) if self.grid else (count, *self.pixels)
        pixels = torch.rand(shape).to(dtype)
        made = {"pixel_values": pixels.unflatten(0, (samples, images)) if self.by_sample else pixels}
        if self.grid is not None:
            made["image_grid_thw"] = torch.tensor([self.grid] * count, dtype=torch.int64)
        if self.size is not None:
            made["image_sizes"] = torch.tensor([[self.size, self.size]] * count, dtype=torch.int64)
        return made


def picture_of(model: nn.Module, config: Mapping[str, Any], size: int | None) -> Picture:
    """Return how a model takes an image of `size` pixels; None for the size that its config names.

    Args:
        model: the model on the meta device.
        config: its config, with transformers' defaults.
        size: pixels of a side.

    Raises:
        BadInput: a model that takes no images, takes something beside them, or does not take that size.
    """
    kind, vision = str(config.get("model_type")), config.get("vision_config")
    owner: Any = next((module for module in model.modules() if hasattr(type(module), "get_image_features")), None)
    token = config.get("image_token_id", config.get("image_token_index"))
    if owner is None or not isinstance(vision, Mapping) or not isinstance(token, int):
        raise _refused(kind, "it has no get_image_features, no vision_config or no image_token_id")
    asked = inspect.signature(owner.get_image_features).parameters
    needed = {name for name, p in asked.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if needed - _TAKEN or _TILED in config:
        raise _refused(kind, f"it takes {', '.join(sorted(needed - _TAKEN)) or 'tiles'} beside pixels")
    forward = inspect.signature(owner.forward).parameters
    marks = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in forward), None)
    if "image_grid_thw" in asked:
        pixels, grid = _patches(kind, vision, size or _GRID_SIZE)
        tries = [Picture(pixels, False, grid, None, token, marks, 0)]
    else:
        side, sizes = _side(kind, vision, size, free="image_sizes" in asked), "image_sizes" in asked
        shape = (int(vision.get("num_channels") or vision.get("in_channels") or 3), side, side)
        tries = [Picture(shape, nested, None, side if sizes else None, token, marks, 0) for nested in (False, True)]
    why = ""
    for tried in tries:
        try:
            tokens = _features(owner, tried)
        except Exception as error:  # a model's own code, which raises anything at a shape that it does not take
            why = why or str(error).splitlines()[0] if str(error) else type(error).__name__
            continue
        return Picture(tried.pixels, tried.by_sample, tried.grid, tried.size, token, marks, tokens)
    raise _refused(kind, f"its get_image_features takes no image of that shape ({why[:80]})")


def _refused(kind: str, why: str) -> BadInput:
    return BadInput(
        f"images of {kind} are not known: {why}",
        where=_WHERE,
        remedy="leave it out for batches of text, or give estimate(module, inputs=...) a batch",
    )


def _patches(kind: str, vision: Mapping[str, Any], size: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the shape of one image's patches, and their grid: processors round each side to whole merged patches."""
    patch, merge = vision.get("patch_size"), vision.get("spatial_merge_size")
    if not isinstance(patch, int) or not isinstance(merge, int):
        raise _refused(kind, "its vision_config has no patch_size or no spatial_merge_size")
    side = max(1, round(size / (patch * merge))) * merge
    channels = int(vision.get("in_channels") or vision.get("in_chans") or vision.get("num_channels") or 3)
    return (side * side, channels * int(vision.get("temporal_patch_size", 1)) * patch**2), (1, side, side)


def _side(kind: str, vision: Mapping[str, Any], size: int | None, *, free: bool) -> int:
    own = vision.get("image_size")
    own = own[0] if isinstance(own, list | tuple) else own
    if not isinstance(own, int):
        raise _refused(kind, "its vision_config has no image_size")
    if size is not None and size != own and not free:
        raise BadInput(f"{kind} scales every image to {own} pixels", where="--image-size", remedy="leave it out")
    return size if free and size is not None else own


def _features(owner: Any, picture: Picture) -> int:
    """Return how many features the model makes of one image."""
    recorder = StorageRecorder([*owner.parameters(), *owner.buffers()], known=KnownValues())
    weight = next(p for p in owner.parameters() if p.is_floating_point())
    with torch.no_grad(), recorder, CudaFunctions(known=True):
        given = {name: tensor.to("meta") for name, tensor in picture.arguments(1, 1, weight.dtype).items()}
        made = owner.get_image_features(**given)
    found = getattr(made, "pooler_output", made)
    parts = found if isinstance(found, list | tuple) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts)


def image_inputs(picture: Picture, samples: int, length: int, images: int, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return the keyword arguments of a forward: each sample begins with its images, one text token after each.

    Raises:
        BadInput: when the images' tokens are more than the sequence has.
    """
    run = picture.tokens + 1
    if images * run > length:
        raise BadInput(
            f"{images} images of {picture.tokens} tokens each need more than {length} tokens",
            where="--seq-len",
            remedy=f"at least {images * run}",
        )
    ids = torch.full((samples, length), 5, dtype=torch.int64)
    for image in range(images):
        ids[:, image * run : image * run + picture.tokens] = picture.token_id
    made: dict[str, Any] = {"input_ids": ids, "labels": ids.clone(), **picture.arguments(samples, images, dtype)}
    if picture.marks is not None:
        made[picture.marks] = (ids == picture.token_id).to(torch.int64)
    return made
