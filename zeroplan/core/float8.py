"""Linear layers that multiply in 8-bit floats while their weights stay as they are: torchao's float8 training."""

from __future__ import annotations

from enum import StrEnum

from zeroplan.core.errors import member_named

#: Compute capability from which ``torch._scaled_mm`` multiplies 8-bit floats.
FLOAT8_CAPABILITY = (8, 9)


class Float8Recipe(StrEnum):
    """How operands are scaled: by one number, by one for each row, or by rows with the weight's gradient left in 16 bits.

    The names are those of torchao 0.18, ``float8/config.py`` (``Float8LinearRecipeName``).
    """

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


def parse_recipe(text: str, where: str = "--fp8") -> Float8Recipe:
    """Return the recipe of this name.

    Raises:
        BadInput: an unknown name.
    """
    return member_named(Float8Recipe, text, where=where, fault="no recipe is called {}")
