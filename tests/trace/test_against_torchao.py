"""The rule of float8 layers beside torchao's own code, where it is installed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan.core.float8 import Float8Recipe

torch = pytest.importorskip("torch")
pytest.importorskip("torchao.float8")

pytestmark = pytest.mark.torch

from tests.trace.storages import recorded  # noqa: E402


@pytest.mark.parametrize("recipe", list(Float8Recipe))
@pytest.mark.parametrize("autocasts", [False, True])
def test_a_layer_allocates_what_torchao_does(recipe: Float8Recipe, autocasts: bool) -> None:
    """A layer of 64 to 96 features over 2 × 24 tokens, in bf16 or in fp32 under autocast."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Theirs

    from zeroplan.trace.float8 import Float8Linear, convert

    kept = torch.float32 if autocasts else torch.bfloat16
    config = replace(Float8LinearConfig.from_recipe_name(recipe.value), pad_inner_dim=True)
    theirs = Theirs.from_float(torch.nn.Linear(64, 96, bias=False, dtype=kept), config=config)
    middle = torch.nn.Linear(64, 96, bias=False, dtype=kept)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), middle, torch.nn.Linear(96, 8))
    convert(model, recipe, autocasts=autocasts)
    assert [type(module) for module in model] == [torch.nn.Linear, Float8Linear, torch.nn.Linear]
    ran = [recorded(layer, torch.bfloat16, outside=layer.parameters()) for layer in (model[1], theirs)]
    assert ran[0] == ran[1]
    assert 64 * 96 in ran[0]  # the weight in 8 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_int8_weight_allocates_what_torchao_does(dtype: torch.dtype, autocasts: bool, bias: bool) -> None:
    """The base's layer as ``TorchAoConfig(Int8WeightOnlyConfig())`` makes it, and the bytes that it keeps."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from zeroplan.core.quantization import PackedWeights
    from zeroplan.trace.quantized import ChannelInt8Linear

    ours = torch.nn.Linear(64, 96, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    theirs = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=bias, dtype=torch.bfloat16).requires_grad_(False))
    quantize_(theirs, Int8WeightOnlyConfig(set_inductor_config=False))
    weight = theirs[0].weight
    kept = tuple(one.nbytes for one in (weight.qdata, weight.scale, weight.zero_point))
    assert PackedWeights("torchao", 8, -1).blocks_of_weight((96, 64)) == kept
    ours.__class__ = ChannelInt8Linear
    ran = []
    for layer in (ours, theirs[0]):

        def product(x: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                out: torch.Tensor = layer(x)
            return out

        ran.append(recorded(product, dtype, outside=(weight.qdata, *layer.parameters()) if layer is ours else (weight.qdata,)))
    assert ran[0] == ran[1]
    assert 96 * 64 * (2 if autocasts else dtype.itemsize) in ran[1]  # the whole weight, for the backward
