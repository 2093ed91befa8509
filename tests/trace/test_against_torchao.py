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
