"""bitsandbytes: linear layers over weights in 4 and in 8 bits, and optimizers with states in 8.

A weight is quantised as it comes to the GPU, where it lies whole for as long. What is then kept of it is told in
:mod:`zeroplan.core.quantization`. The products are those of :mod:`zeroplan.trace.quantized`, which are measured under
peft; the loading of weights by these rules is not.

An optimizer keeps a byte for each element of a state and an fp32 scale for every 256, of parameters of 4,096 elements or
more; smaller ones, and those that a script overrides, keep fp32. Paged states of 100,000 elements or more lie in managed
memory, which torch's allocator does not hold.

Source: bitsandbytes 0.50, ``nn/modules.py`` (``Params4bit``, ``Int8Params``), ``functional.py`` (``quantize_4bit``),
``optim/optimizer.py`` (``Optimizer2State.init_state``, ``get_state_buffer``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zeroplan.capturing.kernels.optimizers import InPlace
from zeroplan.capturing.places import on_gpu
from zeroplan.core.optimizer_row import SCALED_BLOCK
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.quantization import Quantization
from zeroplan.trace.quantized import _Int8Product, multiplied

_CODE = 256
_LEAST_PAGED = 100_000


class Params4bit(nn.Parameter):
    """A weight in 4 bits, packed."""

    quant_type, compress_statistics, quant_state, bnb_quantized = "nf4", True, None, True


class Int8Params(nn.Parameter):
    """A weight in 8 bits."""

    SCB, has_fp16_weights = None, False


class _Quantised(nn.Linear):
    """A linear layer whose weight is quantised as it comes to the GPU."""

    packed = False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if not self.packed and on_gpu(self.weight):
            with torch.no_grad():
                self.pack()
            self.packed = True
        return self

    def pack(self) -> None:
        """Put the quantised weight in the place of the whole one."""
        raise NotImplementedError


class Bits4Linear(_Quantised):
    """A linear layer over a weight in 4 bits. `levels`: of quantised scales, which all layers share."""

    from_half = keeps_input = False
    levels: torch.Tensor | None = None

    def __init__(
        self, input_features: int, output_features: int, bias: bool = True, compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True, quant_type: str = "fp4", quant_storage: torch.dtype = torch.uint8, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(input_features, output_features, bias, device)
        self.compute_dtype = compute_dtype
        self.nested, self.quant_type, self.quant_storage = compress_statistics, quant_type, quant_storage

    def pack(self) -> None:
        """Half a byte an element, its scales and their codes."""
        whole = self.weight
        count = -(-whole.numel() // 2)
        packed = whole.new_empty((count // self.quant_storage.itemsize, 1), dtype=self.quant_storage)
        kind = Quantization(self.quant_type if self.nested else f"{self.quant_type}-single")
        held = [whole.new_empty(nbytes, dtype=torch.uint8) for nbytes in kind.states_of_weight(whole.shape)]
        if self.nested and Bits4Linear.levels is None:
            Bits4Linear.levels = whole.new_empty(kind.shared_bytes, dtype=torch.uint8)
        weight: Any = Params4bit(packed, requires_grad=False)
        weight.quant_type, weight.compress_statistics = self.quant_type, self.nested
        weight.quant_state = SimpleNamespace(held=held, shape=whole.shape, dtype=whole.dtype)
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; returns [..., out]."""
        if self.compute_dtype is None:
            self.compute_dtype = x.dtype
        if not self.packed:
            return super().forward(x)
        one = self.weight.detach().reshape(-1)[:1].expand(self.out_features, self.in_features)  # its shape; no bytes
        return multiplied(self, x, one, self.bias)


class Bits8Linear(_Quantised):
    """A linear layer over a weight in 8 bits."""

    index = None

    def __init__(
        self, input_features: int, output_features: int, bias: bool = True, has_fp16_weights: bool = True,
        threshold: float = 0.0, index: Any = None, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(input_features, output_features, bias, device)
        self.state = SimpleNamespace(has_fp16_weights=has_fp16_weights, threshold=threshold, CB=None, SCB=None)
        self.packed = has_fp16_weights  # which stay as they are

    def pack(self) -> None:
        """A byte an element, and a scale a row."""
        weight: Any = Int8Params(self.weight.new_empty(self.weight.shape, dtype=torch.int8), requires_grad=False)
        weight.SCB = self.weight.new_empty(self.out_features, dtype=torch.float32)
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; returns [..., out]."""
        if self.weight.dtype is not torch.int8:
            return super().forward(x)
        out: torch.Tensor = _Int8Product.apply(x, self.weight, None if self.bias is None else self.bias.to(x.dtype))
        return out


class GlobalOptimManager:
    """Parameters whose states a script wants in fp32."""

    _only: Any = None

    def __init__(self) -> None:
        self.whole: set[int] = set()

    @classmethod
    def get_instance(cls) -> GlobalOptimManager:
        """The one of the process."""
        cls._only = cls._only or cls()
        return cls._only  # type: ignore[no-any-return]

    def register_parameters(self, _params: Any) -> None:
        """Nothing is kept."""

    def register_module_override(self, module: nn.Module, name: str, config: dict[str, Any]) -> None:
        """Note a module's parameter."""
        if config.get("optim_bits") == 32:
            self.whole.add(id(getattr(module, name)))

    def override_config(self, parameters: Any, key: str | None = None, value: Any = None, key_value_dict: Any = None) -> None:
        """Note parameters."""
        if (key_value_dict or {key: value}).get("optim_bits") == 32:
            self.whole |= {id(one) for one in (parameters if isinstance(parameters, (list, tuple)) else [parameters])}


class _Optimizer(InPlace):
    """One of bitsandbytes' optimizers: how many states, in how many bits, and whether they are paged."""

    count, bits, paged, least = 2, 32, False, find_optimizer("adamw8bit").least_8bit

    def __init__(self, params: Any, lr: float = 1e-3, *args: Any, optim_bits: int = 0, is_paged: bool = False,
                 min_8bit_size: int = 0, **kwargs: Any) -> None:  # fmt: skip
        super().__init__(params, lr, *args, **kwargs)
        self.bits, self.paged = optim_bits or type(self).bits, is_paged or type(self).paged
        self.least = min_8bit_size or type(self).least
        self._codes: list[torch.Tensor] = []

    def begin(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Make a parameter's states."""
        narrow = self.bits == 8 and param.numel() >= self.least and id(param) not in GlobalOptimManager.get_instance().whole
        if narrow and not self._codes:
            self._codes = [param.new_empty(_CODE, dtype=torch.float32) for _ in range(2)]
        paged = self.paged and param.numel() >= _LEAST_PAGED
        made: dict[str, Any] = {"step": 0}
        for at in range(self.count):
            dtype = torch.uint8 if narrow else torch.float32
            made[f"state{at + 1}"] = torch.zeros((), dtype=dtype) if paged else torch.zeros_like(param, dtype=dtype)
            if narrow:
                made[f"absmax{at + 1}"] = param.new_zeros(-(-param.numel() // SCALED_BLOCK), dtype=torch.float32)
        return made


def _optimizers() -> dict[str, type[_Optimizer]]:
    found = {}
    for name, count in (("Adam", 2), ("AdamW", 2), ("LAMB", 2), ("AdEMAMix", 3), ("SGD", 1), ("Lion", 1), ("RMSprop", 1),
                        ("Adagrad", 1), ("LARS", 1)):  # fmt: skip
        for before, paged in (("", False), ("Paged", True)):
            for after, bits in (("", 32), ("8bit", 8), ("32bit", 32)):
                whole = f"{before}{name}{after}"
                fields = {"count": count, "bits": bits, "paged": paged, "__module__": "bitsandbytes.optim"}
                found[whole] = type(whole, (_Optimizer,), fields)
    return found


RULES: dict[str, Any] = {
    **{one.__name__: one for one in (Params4bit, Int8Params, GlobalOptimManager)},
    "Linear4bit": Bits4Linear,
    "Linear8bitLt": Bits8Linear,
    **_optimizers(),
    "LinearNF4": type("LinearNF4", (Bits4Linear,), {}),
}


def quantise(model: nn.Module, config: Any) -> None:
    """Put quantised layers in the place of a model's linear ones, its head and what the config skips aside.

    Args:
        model: of transformers, on the host.
        config: a ``BitsAndBytesConfig``.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    skipped = tuple(getattr(config, "llm_int8_skip_modules", None) or ())
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module is head or name.rpartition(".")[2] in skipped or name in skipped:
            continue
        biased = module.bias is not None
        made: Any
        if config.load_in_4bit:
            storage = getattr(config, "bnb_4bit_quant_storage", torch.uint8)
            made = Bits4Linear(
                module.in_features, module.out_features, biased, config.bnb_4bit_compute_dtype,
                config.bnb_4bit_use_double_quant, config.bnb_4bit_quant_type, storage,
            )  # fmt: skip
        else:
            made = Bits8Linear(module.in_features, module.out_features, biased, False, config.llm_int8_threshold)
        made.weight, made.bias = module.weight, module.bias
        made.requires_grad_(False)
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], made)
