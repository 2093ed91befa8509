"""Keys that ask accelerate for torchao's 8-bit products (``fp8``), as axolotl and LLaMA-Factory hand them on.

Both give accelerate a ``Float8LinearConfig`` without padding. axolotl scales by tensor, and accelerate picks the layers.
LLaMA-Factory scales by row, and its own filter takes the first linear layer as well, which is counted in 16 bits: its copies
come and go where little else is held.

Source: axolotl, ``utils/fp8.py`` (``build_fp8_linear_config``), ``monkeypatch/trainer_accelerator_args.py``; LLaMA-Factory,
``train/fp8_utils.py`` (``create_fp8_kwargs``).
"""

from __future__ import annotations

from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.builder import Builder

_GATHER = "fp8_enable_fsdp_float8_all_gather"
_PADDING = "operands in 8 bits are counted with the copies that padding makes"


def set_float8(run: Builder, recipe: Float8Recipe) -> None:
    """Set 8-bit products where ``fp8`` is on; what other packages do, and weights that are gathered in 8 bits, are left out.

    Args:
        run: the builder, whose engine and arithmetic are known.
        recipe: of the program's own config.
    """
    if not run.flag("fp8"):
        return
    backend = run.word("fp8_backend") or "auto"
    if backend not in ("auto", "torchao"):
        run.leave_out("fp8_backend", Effect.UNKNOWN, f"fp8 products by {backend[:20]}; bf16 ones are counted")
    elif run.fields.get("dtype") != "bf16":
        run.leave_out("fp8", Effect.UNKNOWN, "fp8 products beside another arithmetic than bf16")
    else:
        run.set("fp8", recipe.value, "fp8")
        run.leave_out("fp8", Effect.LESS, _PADDING)
        if run.flag(_GATHER) and recipe is Float8Recipe.TENSORWISE:
            run.leave_out(_GATHER, Effect.UNKNOWN, "weights are gathered in 8 bits; 16 are counted")
