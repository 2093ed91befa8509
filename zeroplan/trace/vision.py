"""Micro batches with images as real tensors on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.images import ImageBatch


def image_inputs(batch: ImageBatch, samples: int, length: int, images: int, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return the keyword arguments of a forward: each sample begins with its images of noise, one text token after each.

    Raises:
        BadInput: when the images' tokens are more than the sequence has.
    """
    run = batch.tokens + 1
    if images * run > length:
        raise BadInput(
            f"{images} images of {batch.tokens} tokens each need more than {length} tokens",
            where="--seq-len",
            remedy=f"at least {images * run}",
        )
    ids = torch.full((samples, length), 5, dtype=torch.int64)
    for image in range(images):
        ids[:, image * run : image * run + batch.tokens] = batch.token_id
    made: dict[str, Any] = {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.rand(batch.pixels).to(dtype)}
    if batch.grid is not None:
        made["image_grid_thw"] = torch.tensor([batch.grid] * (samples * images), dtype=torch.int64)
    if batch.marks is not None:
        made[batch.marks] = (ids == batch.token_id).to(torch.int64)
    return made
