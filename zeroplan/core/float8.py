"""Linear layers that multiply in 8-bit floats: by torchao, TransformerEngine or the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zeroplan.core.errors import BadInput, member_named

#: Compute capability from which ``torch._scaled_mm`` multiplies 8-bit floats, and that from which blocks of 32 are.
FLOAT8_CAPABILITY, MXFP8_CAPABILITY = (8, 9), (10, 0)
#: Elements of a row, and rows and columns of a weight, that share a scale in :attr:`Float8Recipe.BLOCKWISE`.
BLOCK = 128


class Float8Recipe(StrEnum):
    """How operands are scaled: by one number, by one for each row, by rows with the weight's gradient left in 16 bits, by
    blocks, by one number of earlier steps, or by 32 elements of a row or column.

    The names are those of torchao 0.18, ``float8/config.py`` (``Float8LinearRecipeName``), and of Megatron's ``--fp8-recipe``.
    """

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    BLOCKWISE = "blockwise"
    DELAYED = "delayed"
    MXFP8 = "mxfp8"


@dataclass(frozen=True, slots=True)
class Bf16Layers:
    """How many of a model's first and last blocks multiply in bf16 where the others do in 8 bits.

    The keys' names are Megatron's: ``--num-layers-at-start-in-bf16``, ``--num-layers-at-end-in-bf16``.
    """

    at_start: int
    at_end: int

    def others(self, count: int) -> range:
        """Return which of `count` blocks multiply in 8 bits. Raises BadInput: where none does."""
        if self.at_start + self.at_end >= count:
            what = f"no block of the model's {count} is left for 8-bit products"
            raise BadInput(what, where="zeroplan.num_layers_at_start_in_bf16", remedy="lower it, or leave float8 out")
        return range(self.at_start, count - self.at_end)


#: TransformerEngine's recipe of 4-bit floats.
_NVFP4 = "nvfp4"
#: What the included runtime multiplies by.
RUNTIME_RECIPES = (Float8Recipe.TENSORWISE, Float8Recipe.ROWWISE, Float8Recipe.BLOCKWISE)
#: What Megatron-Core passes to TransformerEngine.
MEGATRON_RECIPES = (Float8Recipe.DELAYED, Float8Recipe.TENSORWISE, Float8Recipe.BLOCKWISE, Float8Recipe.MXFP8)
#: What torchao's ``Float8LinearConfig`` knows by name.
TORCHAO_RECIPES = (Float8Recipe.TENSORWISE, Float8Recipe.ROWWISE, Float8Recipe.ROWWISE_WITH_GW_HP)


def multiple_of(recipe: Float8Recipe) -> int:
    """Return what a layer's sizes are multiples of: tensor cores' 16, or as many blocks as cuBLAS reads scales of at once."""
    return 4 * BLOCK if recipe is Float8Recipe.BLOCKWISE else 16


def parse_recipe(text: str, where: str = "--fp8") -> Float8Recipe:
    """Return the recipe of this name. Raises BadInput: an unknown name, or products in 4 bits."""
    if text.strip().lower() == _NVFP4:
        what = "TransformerEngine's 4-bit products are not modelled, neither their memory nor their time"
        raise BadInput(what, where=where, remedy=f"plan {Float8Recipe.MXFP8}, the nearest that is")
    return member_named(Float8Recipe, text, where=where, fault="no recipe is called {}")
