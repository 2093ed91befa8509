"""Values of tensors on the meta device, where the model reads them: positions of images, their grids, masks made of them.

Note [Known values]
    A vision-language model cuts its images' patches by numbers that it reads from ``image_grid_thw``, and counts placeholder
    tokens. So a batch with images is given as real tensors, and each operator whose arguments all have values is run on the
    CPU as well as on the meta device. What the model then reads, or selects by a mask, is what it would on a GPU. Tensors
    with many elements, and whatever is computed from weights or pixels, have no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_aten = torch.ops.aten
#: Elements up to which values are kept: integers and masks tell shapes, other numbers hardly do.
_MOST = {True: 1 << 22, False: 1 << 12}
#: Bytes of those of integers and masks: a mask that is spread over the hidden states has one value a token.
_MOST_BYTES = 1 << 25
#: Operators whose result has a shape that follows from values.
_SHAPED_BY_VALUES = frozenset(
    (
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten.repeat_interleave.Tensor,
        _aten.unique_consecutive.default,
        _aten._unique2.default,
        _aten.unique_dim.default,
        _aten.bincount.default,
        _aten.index.Tensor,
    )
)


class KnownValues:
    """The values of meta tensors, followed through a run. See Note [Known values]."""

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's values, on the CPU; None where they are not known."""
        if tensor.device.type != "meta":
            return tensor
        found: torch.Tensor | None = self._values.get(tensor)
        return found

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on its arguments' values; None where one has none, or they are too many."""
        tensors = [leaf for leaf in _leaves((*args, *kwargs.values())) if isinstance(leaf, torch.Tensor)]
        values = [self.of(tensor) for tensor in tensors]
        if any(value is None or _large(value) for value in values) or func.namespace != "aten":
            self._forget(func, args)
            return None
        if not tensors and not _small_factory(args, kwargs):
            return None

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            return self.of(leaf) if isinstance(leaf, torch.Tensor) else leaf

        with torch.no_grad():
            try:
                return func(*tree_map(real, args), **tree_map(real, kwargs))
            except (RuntimeError, IndexError, NotImplementedError):  # an operator that the CPU lacks
                self._forget(func, args)
                return None

    def result(self, func: Any, made: Any) -> Any:
        """Return the meta result of an operator whose shape follows from the values that it `made`; None for others."""
        if made is None or func not in _SHAPED_BY_VALUES:
            return None

        def meta(leaf: Any) -> Any:
            return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf

        return tree_map(meta, made)

    def keep(self, out: Any, made: Any) -> None:
        """Note the values that an operator's result has."""
        if made is None:
            return
        for tensor, value in zip(_leaves((out,)), _leaves((made,)), strict=False):
            if not isinstance(tensor, torch.Tensor) or not isinstance(value, torch.Tensor) or tensor.device.type != "meta":
                continue
            if not _large(value) and tensor.shape == value.shape:
                self._values[tensor] = value

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop a tensor's values."""
        self._values.pop(tensor, None)

    def _forget(self, func: Any, args: Any) -> None:
        """Drop the values of what an operator changes in place by unknown ones."""
        if not getattr(func, "_schema", None) or not func._schema.is_mutable or not args:
            return
        changed = args[0]
        value = self._values.get(changed) if isinstance(changed, torch.Tensor) else None
        if value is not None:
            storage = value.untyped_storage()._cdata
            for tensor, other in list(self._values.items()):
                if other.untyped_storage()._cdata == storage:
                    del self._values[tensor]


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield an operator's arguments or results, those in lists one by one."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _large(value: torch.Tensor) -> bool:
    if value.is_floating_point() or value.is_complex():
        return value.numel() > _MOST[False]
    return value.untyped_storage().nbytes() > _MOST_BYTES


def _small_factory(args: Any, kwargs: Any) -> bool:
    """Return whether an operator without tensors makes few elements: a range, or what a shape in its arguments gives."""
    numbers = [leaf for leaf in _leaves(args) if isinstance(leaf, int | float) and not isinstance(leaf, bool)]
    product = 1
    for number in filter(math.isfinite, numbers):
        product *= max(1, abs(int(number)))
    dtype = kwargs.get("dtype")
    return product <= _MOST[dtype is None or not dtype.is_floating_point]
