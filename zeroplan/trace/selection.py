"""Operators whose result has as many elements as a mask selects, which the meta device cannot know.

All are taken to be selected: labels are valid, tokens are unpadded, images stand where they may. That is what a full batch of
real data gives, and it is the most that any data can take.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroplan.trace.known import KnownValues

_aten = torch.ops.aten
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


def _places(mask: torch.Tensor, known: KnownValues | None) -> torch.Tensor:
    """Allocate the places as ``nonzero`` does: [selected, dimensions], int64."""
    value = known.of(mask) if known is not None else None
    selected = mask.numel() if value is None else int(value.count_nonzero())
    return torch.empty((selected, max(mask.dim(), 1)), dtype=torch.int64, device=mask.device)


def result(func: Any, args: Any, known: KnownValues | None = None) -> Any:
    """Return the operator's result where a mask decides its shape, or where torch has no rule for it; else None."""
    if func is _aten._ctc_loss.Tensor and args[0].device.type == "meta":
        return _ctc(args[0], args[1])
    if func is _aten._ctc_loss_backward.Tensor and args[1].device.type == "meta":
        return torch.empty_like(args[1], memory_format=torch.contiguous_format)
    if func is _aten.nonzero.default and args[0].device.type == "meta":
        return _places(args[0], known)
    if func is _aten.masked_select.default and args[0].device.type == "meta":
        both: torch.Size = torch.broadcast_shapes(args[0].shape, args[1].shape)
        value = known.of(args[1]) if known is not None else None
        count = both.numel() if value is None else int(value.expand(both).count_nonzero())
        chosen: torch.Tensor = args[0].new_empty(count)
        return chosen
    return None


def _ctc(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return CTC's losses of each sample, and its forward variables (``LossCTC.cu``, ``ctc_loss_gpu_template``).

    scores: [frames, samples, words]; targets: those of all samples behind one another.
    """
    frames, samples, _ = scores.shape
    longest = targets.numel() // max(samples, 1) if targets.dim() == 1 else targets.shape[1]
    return scores.new_empty(samples), scores.new_empty((samples, frames, 2 * longest + 1))


def arguments(func: Any, args: Any, known: KnownValues | None = None) -> Any:
    """Return the operator's arguments, with the places that a mask selects in its stead (``TensorAdvancedIndexing``)."""
    if func not in _INDEXING:
        return args
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and index.device.type == "meta":
            indices += _places(index, known).unbind(1)
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])
