"""Parameters: a model's parameters as one list, whether a ModelSpec or a tape tells of them.

Engines derive what a rank holds from this list alone, so the ledger, which knows the ModelSpec, and the schedule, which
plays a tape, read the same numbers. A test holds that both lists agree for the models of the catalog.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Parameters:
    """Every parameter in the order of ``module.parameters()``, tied ones once. Columns have one entry a parameter.

    Attributes:
        names: full names.
        shapes: shapes.
        trainable: which ones receive a gradient.
        autocast: which ones belong to a layer that autocast runs in 16 bits: linear layers and convolutions.
        blocks: the full name of the block that each lies in; empty outside the blocks.
        modules: indices of the parameters that each module owns, module by module. A tied parameter is in every owner.
        embeddings: which ones are the table of an embedding.
        quantized: which ones are kept in fewer bits where the workload quantises the base.
        weights: shapes of the weights, where `shapes` tells how quantised ones are stored; else empty.
        unreached: indices of trainable ones that no micro batch gives a gradient, such as a pooler behind which nothing is
            computed; known of a tape alone.
        stand_in: the list is one stand-in of a model of which only the number of parameters is known.
        largest_layer: elements of the largest layer, where that is known of such a model.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trainable: tuple[bool, ...]
    autocast: tuple[bool, ...]
    blocks: tuple[str, ...]
    modules: tuple[tuple[int, ...], ...]
    embeddings: tuple[bool, ...] = ()
    quantized: tuple[bool, ...] = ()
    weights: tuple[tuple[int, ...], ...] = ()
    unreached: frozenset[int] = frozenset()
    stand_in: bool = False
    largest_layer: int | None = None

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def block_count(self) -> int:
        """How many blocks there are."""
        return len({block for block in self.blocks if block})

    @cached_property
    def numel(self) -> tuple[int, ...]:
        """Elements of each."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Indices of those that an optimizer steps: trainable, and not empty."""
        return tuple(p for p, on in enumerate(self.trainable) if on and self.numel[p])

    @cached_property
    def reached(self) -> tuple[int, ...]:
        """Indices of those that get a gradient."""
        return tuple(p for p in self.trained if p not in self.unreached)

    def reached_but(self, names: frozenset[str]) -> Parameters:
        """Return the list with the parameters of these names unreached."""
        return replace(self, unreached=frozenset(p for p, name in enumerate(self.names) if name in names)) if names else self

    @cached_property
    def entries(self) -> tuple[int, ...]:
        """The parameter of each entry of a state dict: a tied one once for each of its owners."""
        return tuple(p for owned in self.modules for p in owned)

    @cached_property
    def adapters(self) -> tuple[bool, ...]:
        """A flag a parameter: whether LoRA added it to the model that was built."""
        return tuple(".lora_" in name for name in self.names)

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """Indices of those that are quantised."""
        return tuple(p for p, on in enumerate(self.quantized) if on)

    def stored(self, stored_shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Parameters:
        """Return the list with quantised weights in the shapes in which they are stored."""
        shapes = list(self.shapes)
        for p in self.packed:
            shapes[p] = stored_shape(shapes[p])
        return replace(self, shapes=tuple(shapes), weights=self.shapes)

    @cached_property
    def total(self) -> int:
        """Elements of all."""
        return sum(self.numel)

    @cached_property
    def trained_total(self) -> int:
        """Elements of those that receive a gradient."""
        return sum(self.numel[p] for p in self.trained)

    @cached_property
    def largest_trained(self) -> int:
        """Elements of the largest one with a gradient. Of a stand-in, elements of the largest layer, or 0."""
        if self.stand_in:
            return self.largest_layer or 0
        return max((self.numel[p] for p in self.trained), default=0)
