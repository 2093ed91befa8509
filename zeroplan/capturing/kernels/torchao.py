"""torchao: optimizers with states in 8 and 4 bits and 8-bit floats (AdamW's are measured), and training in 8-bit floats.

A state of a parameter of 4,096 elements or more, in whole blocks, is packed with an fp32 scale a block and, of integers, a
table of its values; others keep the parameter's dtype. Steps are compiled, and allocate nothing. What
``convert_to_float8_training`` makes of linear layers is :mod:`zeroplan.trace.float8`, which is measured without compilation.

Source: torchao 0.18, ``optim/adam.py`` (``_AdamBase._new_buffer``), ``optim/subclass_8bit.py``, ``subclass_4bit.py``,
``subclass_fp8.py``; ``float8/float8_linear_utils.py`` (``convert_to_float8_training``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zeroplan.capturing.kernels.optimizers import InPlace
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line
from zeroplan.core.float8 import Float8Recipe
from zeroplan.trace.float8 import Float8Linear

_LEAST = 4096
_TABLE = {8: 256, 4: 16}


class _Adam(InPlace):
    """Two packed states; `bits` an element, blocks of `block`, with a table of values or none."""

    states, bits, block, table = ("exp_avg", "exp_avg_sq"), 8, 256, True

    def begin(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Make a parameter's states."""
        if param.numel() < _LEAST or param.numel() % self.block:
            return {name: torch.zeros_like(param) for name in self.states}
        made: dict[str, Any] = {}
        for name in self.states:
            made[name] = param.new_zeros(param.numel() * self.bits // 8, dtype=torch.uint8)
            made[f"{name}.scale"] = param.new_zeros(param.numel() // self.block, dtype=torch.float32)
            if self.table:
                made[f"{name}.qmap"] = param.new_zeros(_TABLE[self.bits], dtype=torch.float32)
        return made


def _optimizers() -> dict[str, type[_Adam]]:
    kinds = {"8bit": (8, 256, True), "4bit": (4, 128, True), "Fp8": (8, 256, False)}
    return {
        f"{name}{kind}": type(f"{name}{kind}", (_Adam,), {"bits": bits, "block": block, "table": table})
        for name in ("Adam", "AdamW")
        for kind, (bits, block, table) in kinds.items()
    }


class Float8LinearConfig:
    """The config of 8-bit products: a recipe's name (``tensorwise``, ``rowwise``), and options that change no memory."""

    def __init__(self, recipe: str = "tensorwise", **other: Any) -> None:
        self.recipe, self.other = recipe, set(other) - {"enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate"}

    @classmethod
    def from_recipe_name(cls, name: Any) -> Float8LinearConfig:
        """The config of a recipe's name."""
        return cls(str(getattr(name, "value", name)))


def convert_to_float8_training(module: nn.Module, *, module_filter_fn: Any = None, config: Any = None) -> nn.Module:
    """Let linear layers multiply in 8-bit floats, those that the filter takes."""
    config = config or Float8LinearConfig()
    try:
        recipe = Float8Recipe(config.recipe)
    except ValueError:
        recipe = None
    if recipe is None or config.other:
        raise StoppedError("no rule knows what torchao's float8 allocates by a config of one's own", user_line())
    for name, one in module.named_modules():
        if type(one) is nn.Linear and (module_filter_fn is None or module_filter_fn(one, name)):
            one.__class__ = Float8Linear
            taken: Any = one
            taken.recipe, taken.autocasts = recipe, False
    return module


def precompute_float8_dynamic_scale_for_fsdp(*_: Any, **__: Any) -> None:
    """A number a tensor."""


RULES: dict[str, Any] = {
    **_optimizers(),
    "Float8LinearConfig": Float8LinearConfig,
    "convert_to_float8_training": convert_to_float8_training,
    "precompute_float8_dynamic_scale_for_fsdp": precompute_float8_dynamic_scale_for_fsdp,
    "config": SimpleNamespace(Float8LinearConfig=Float8LinearConfig),
}
