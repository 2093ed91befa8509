"""The rules of quantised layers beside bitsandbytes' own code, where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from zeroplan.core.quantization import Quantization

torch = pytest.importorskip("torch")
bitsandbytes = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.torch

from tests.trace.storages import recorded  # noqa: E402


def kernels_of(backend: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """The Python code of a backend's operators, over a library whose kernels do nothing."""
    from bitsandbytes import _ops, cextension

    found: dict[str, Callable[..., Any]] = {}

    def register(name: str, _: str) -> Callable[[Any], Any]:
        return lambda function: found.setdefault(name.partition("::")[2], function)

    def nothing(*_: Any) -> int:
        return 0

    class Library:
        def __getattr__(self, name: str) -> Any:
            return nothing

    name = f"bitsandbytes.backends.{backend}.ops"
    place = importlib.util.find_spec(f"bitsandbytes.backends.{backend}")
    assert place is not None
    assert place.submodule_search_locations
    spec = importlib.util.spec_from_file_location(name, f"{place.submodule_search_locations[0]}/ops.py")
    assert spec is not None
    assert spec.loader is not None
    with monkeypatch.context() as patched:
        patched.setattr(_ops, "register_kernel", register)
        patched.setattr(cextension, "lib", Library())
        patched.setattr(torch._C, "_cuda_getCurrentRawStream", nothing, raising=False)
        module = importlib.util.module_from_spec(spec)
        patched.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    if backend == "cuda":
        from contextlib import nullcontext

        monkeypatch.setattr(module, "_cuda_device_of", lambda _: nullcontext())
        monkeypatch.setattr(module.CUBLAS_Context, "get_instance", lambda: SimpleNamespace(get_context=nothing))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_product_allocates_what_bitsandbytes_does(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python code for CUDA runs on the CPU, over kernels that do nothing: it makes the tensors that the rule makes."""
    from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

    from zeroplan.trace.quantized import _Int8Product

    functions = kernels_of("default", monkeypatch) | kernels_of("cuda", monkeypatch)
    operators = SimpleNamespace()
    for name, function in functions.items():

        def call(*args: Any, _function: Any = function, **kwargs: Any) -> Any:
            return _function(*args, **kwargs)

        call.default = call  # type: ignore[attr-defined]
        setattr(operators, name, call)
    monkeypatch.setattr(torch.ops, "bitsandbytes", operators)
    state = MatmulLtState()
    state.has_fp16_weights, state.threshold = False, 6.0
    state.CB, state.SCB = torch.zeros(96, 64, dtype=torch.int8), torch.ones(96)
    theirs = recorded(lambda x: MatMul8bitLt.apply(x, state.CB, None, None, state), dtype)
    weight = torch.empty(96, 64, device="cpu")
    ours = recorded(lambda x: _Int8Product.apply(x, weight, None), dtype)
    assert ours == theirs
    assert 96 * 64 * dtype.itemsize in theirs  # the whole weight, for the backward


def test_bytes_of_weights() -> None:
    """What each format keeps of a small random weight."""
    for shape in ((96, 64), (5, 13), (130, 520)):
        weight = torch.randn(shape)
        kept = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
        assert Quantization.INT8.blocks_of_weight(shape) == (kept.CB.nbytes, kept.SCB.nbytes)
        for levels in ("nf4", "fp4"):
            for nested in (True, False):
                packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type=levels, compress_statistics=nested)
                blocks = [packed.nbytes, state.absmax.nbytes, state.code.nbytes]
                if nested:
                    blocks += [state.state2.absmax.nbytes, state.offset.nbytes]
                said = Quantization(levels if nested else f"{levels}-single").blocks_of_weight(shape)
                assert sorted(said) == sorted(blocks)
                if nested:
                    assert Quantization.NF4.shared_bytes == state.state2.code.nbytes
