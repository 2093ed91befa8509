"""What TransformerEngine's layers keep of weights, inputs and gradients in 8 bits.

Note [TransformerEngine's 8 bits]
    A linear layer quantises its input, its weight and its output's gradient, and multiplies in 8 bits in both passes; head,
    attention, norms and routers stay in 16 bits. Each operand is read along its rows by one product and along its columns by
    another. With one scale a tensor (``delayed``, ``tensorwise``), products below compute capability 10.0 take rows alone, so
    that columns are a transposed copy; from there on one tensor serves both. With a scale for each 32 or 128 elements
    (``mxfp8``, ``blockwise``) each direction is quantised by itself. For the backward an input's columns are kept and its rows
    go; where its gather is repeated there, tensors of one scale keep the rows, which alone can be gathered.

    A weight's copies are made in the first forward and written anew each step, unless the weight itself is in 8 bits
    (``--fp8-param-gather``): then it has its transpose beside it.
    Sources: TransformerEngine of 22 August 2026, ``pytorch/module/linear.py``, ``layernorm_linear.py``, ``grouped_linear.py``,
    ``module/base.py`` (``quantize_weight``), ``tensor/storage/float8_tensor_storage.py`` (``update_usage``), and the quantizer
    of its extensions; Megatron-Core 0.16.1, ``megatron/core/transformer/attention.py`` (``set_save_original_input``).
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.float8 import Float8Recipe
from zeroplan.engines.megatron.autograd import Storage, TapeWriter

#: From which compute capability products of one scale a tensor take rows and columns alike.
_EITHER_WAY = (10, 0)
#: Elements for a byte of scales: one of 8 bits for 32 elements, or one of 32 bits for 128.
_ELEMENTS_A_SCALE_BYTE = 32


@dataclass(frozen=True, slots=True)
class QuantizedOperands:
    """How operands are quantised. See Note [TransformerEngine's 8 bits].

    Attributes:
        recipe: one of Megatron's ``--fp8-recipe``.
        transposes: whether a tensor of one scale is kept once more, transposed.
    """

    recipe: Float8Recipe
    transposes: bool = True

    @classmethod
    def on(cls, recipe: Float8Recipe, capability: tuple[int, int]) -> QuantizedOperands:
        """Return that of a recipe on cards of a compute capability."""
        return cls(recipe, capability < _EITHER_WAY)

    @property
    def blocks(self) -> bool:
        """Whether parts of a row or a column have a scale each."""
        return self.recipe in (Float8Recipe.BLOCKWISE, Float8Recipe.MXFP8)

    @property
    def directions(self) -> int:
        """How often an operand is kept that both directions are read of."""
        return 2 if self.blocks or self.transposes else 1

    @property
    def normalizes(self) -> bool:
        """Whether a norm's kernel writes 8 bits itself."""
        return self.recipe is Float8Recipe.DELAYED

    def size(self, elements: int) -> int:
        """Return the bytes of one direction of so many elements, scales included."""
        return elements + (elements // _ELEMENTS_A_SCALE_BYTE if self.blocks else 0)

    def make(self, w: TapeWriter, elements: int, *, columns: bool = True) -> tuple[Storage, Storage | None]:
        """Quantise a tensor: its rows, and its columns where they are a tensor of their own."""
        rows = w.empty(self.size(elements))
        return rows, w.empty(self.size(elements)) if columns and self.directions == 2 else None
