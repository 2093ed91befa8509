"""Linear layers that multiply in 8-bit floats while their weights stay as they are: torchao's training and the runtime's."""

from __future__ import annotations

from enum import StrEnum

from zeroplan.core.errors import member_named

#: Compute capability from which ``torch._scaled_mm`` multiplies 8-bit floats.
FLOAT8_CAPABILITY = (8, 9)
#: Elements of a row, and rows and columns of a weight, that share a scale in :attr:`Float8Recipe.BLOCKWISE`.
BLOCK = 128


class Float8Recipe(StrEnum):
    """How operands are scaled: by one number, by one for each row, by rows with the weight's gradient left in 16 bits, or by
    blocks.

    The names are those of torchao 0.18, ``float8/config.py`` (``Float8LinearRecipeName``), but for the last, DeepSeek-V3's.
    """

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    BLOCKWISE = "blockwise"


#: What the included runtime multiplies by.
RUNTIME_RECIPES = (Float8Recipe.TENSORWISE, Float8Recipe.ROWWISE, Float8Recipe.BLOCKWISE)
#: What torchao's ``Float8LinearConfig`` knows by name.
TORCHAO_RECIPES = (Float8Recipe.TENSORWISE, Float8Recipe.ROWWISE, Float8Recipe.ROWWISE_WITH_GW_HP)


def multiple_of(recipe: Float8Recipe) -> int:
    """Return what a layer's sizes are multiples of: tensor cores' 16, or as many blocks as cuBLAS reads scales of at once."""
    return 4 * BLOCK if recipe is Float8Recipe.BLOCKWISE else 16


def parse_recipe(text: str, where: str = "--fp8") -> Float8Recipe:
    """Return the recipe of this name. Raises BadInput: an unknown name."""
    return member_named(Float8Recipe, text, where=where, fault="no recipe is called {}")
