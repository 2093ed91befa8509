"""The fused transformer layer against a plain reference: values, gradients, dropout, and what each memory flag keeps."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zeroplan.core.errors import BadInput
from zeroplan_runtime.kernels.philox import Dropout, kept
from zeroplan_runtime.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

pytestmark = pytest.mark.torch

HIDDEN, HEADS, INNER, SAMPLES, TOKENS = 32, 4, 72, 3, 13
FLAGS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")
EVERY = [dict(zip(FLAGS, each, strict=True)) for each in itertools.product((False, True), repeat=3)]
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "heads": HEADS,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
}


def layer_of(**options: Any) -> DeepSpeedTransformerLayer:
    """A layer in fp64-sized trouble: norms and biases that are not what they begin as."""
    torch.manual_seed(0)
    made = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**{**SIZES, **options}))
    with torch.no_grad():
        for name, param in made.named_parameters():
            if param.dim() == 1:
                param.normal_(std=0.3).add_(1.0 if name in ("attn_nw", "norm_w") else 0.0)
    return made


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and a mask that hides the last tokens of a sample."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(SAMPLES, TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    seen = torch.ones(SAMPLES, 1, 1, TOKENS, dtype=torch.bool)
    seen[1, ..., 9:] = False
    return hidden, seen


def reference(layer: DeepSpeedTransformerLayer, hidden: torch.Tensor, seen: torch.Tensor, seed: int | None) -> torch.Tensor:
    """What the layer computes, in torch's operations and fp64; `seed` of the dropouts, None for none."""
    config = layer.config
    params = {name: param.double() for name, param in layer.named_parameters()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, (HIDDEN,), params[f"{name}_w"], params[f"{name}_b"], config.layer_norm_eps)

    def drop(x: torch.Tensor, ratio: float, stream: int) -> torch.Tensor:
        if seed is None or not ratio:
            return x
        one = Dropout(ratio, torch.tensor([seed]), config.seed, stream)
        return torch.where(kept(one, x.shape), x * one.scale, 0.0)

    params |= {"attn_n_w": params["attn_nw"], "attn_n_b": params["attn_nb"]}
    x = hidden.double()
    rows = norm(x, "norm") if config.pre_layer_norm else x
    query, key, value = (
        each.view(SAMPLES, TOKENS, HEADS, -1).transpose(1, 2)
        for each in functional.linear(rows, params["attn_qkvw"], params["attn_qkvb"]).chunk(3, -1)
    )
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    context = drop(scores.softmax(-1), config.attn_dropout_ratio, 2) @ value
    context = context.transpose(1, 2).reshape(x.shape)
    ratio = config.hidden_dropout_ratio
    summed = x + drop(functional.linear(context, params["attn_ow"], params["attn_ob"]), ratio, 0)
    normed = norm(summed, "attn_n")
    inner = functional.linear(normed, params["inter_w"], params["inter_b"])
    active = functional.gelu(inner, approximate=config.gelu_approximate)
    product = drop(functional.linear(active, params["output_w"], params["output_b"]), ratio, 1)
    return summed + product if config.pre_layer_norm else norm(normed + product, "norm")


def gradients(out: torch.Tensor, hidden: torch.Tensor, layer: DeepSpeedTransformerLayer) -> list[torch.Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), [hidden, *layer.parameters()]))


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach().double() - other.detach().double()).norm() / other.detach().double().norm())


@contextmanager
def saved_bytes() -> Iterator[dict[int, int]]:
    """Bytes of the memory that is kept for a backward, by address; parameters are left out by the caller."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("pre", [False, True])
def test_values_and_gradients_are_the_references_with_every_flag(pre: bool, approximate: str) -> None:
    """With dropout of both kinds, a mask, and a seed of the config."""
    hidden, seen = batch()
    ratios = {"attn_dropout_ratio": 0.2, "hidden_dropout_ratio": 0.3}
    plain = layer_of(pre_layer_norm=pre, gelu_approximate=approximate, seed=11, **ratios)
    torch.manual_seed(5)
    seed = int(torch.randint(2**63 - 1, (1,)))
    expected = reference(plain, hidden, seen, seed)
    exact = gradients(expected, hidden, plain)
    first: torch.Tensor | None = None
    for flags in EVERY:
        layer = layer_of(pre_layer_norm=pre, gelu_approximate=approximate, seed=11, **ratios, **flags)
        torch.manual_seed(5)
        out = layer(hidden, seen)
        assert error(out, expected) < 1e-6
        first = out if first is None else first
        assert torch.equal(out, first)  # the flags change no value and no dropped element
        for one, other in zip(gradients(out, hidden, layer), exact, strict=True):
            assert one.dtype is torch.float32
            assert error(one, other) < 5e-6


def test_the_flags_change_no_gradient_by_a_bit_but_the_inversion_does() -> None:
    hidden, seen = batch()
    found = []
    for flags in EVERY:
        layer = layer_of(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.3, **flags)
        torch.manual_seed(5)
        found.append((flags, gradients(layer(hidden, seen), hidden, layer)))
    for inverts in (False, True):
        alike = [each for flags, each in found if flags["normalize_invertible"] is inverts]
        assert all(torch.equal(one, other) for each in alike for one, other in zip(each, alike[0], strict=True))


def planned_bytes(layer: DeepSpeedTransformerLayer, size: int) -> int:
    """The formula of Note [What a layer keeps], and that of attention with its scores."""
    config, rows = layer.config, SAMPLES * TOKENS
    wide, inner, scores = rows * size * HIDDEN, rows * size * INNER, SAMPLES * HEADS * TOKENS * TOKENS * size
    kept_always = 3 * wide + wide + wide + inner + wide  # qkv, context, normed, before GELU, and the input or its norm
    kept_always += 8 * rows + 8
    if not config.gelu_checkpoint:
        kept_always += inner
    if not config.normalize_invertible:
        kept_always += 2 * wide + 8 * rows
    elif not config.pre_layer_norm:
        kept_always += wide  # the output
    return kept_always + scores * (1 if config.attn_dropout_checkpoint else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pre", [False, True])
def test_what_is_kept_is_the_formula(pre: bool, dtype: torch.dtype) -> None:
    """To the byte, by the memory of the saved tensors."""
    for flags in EVERY:
        layer = layer_of(pre_layer_norm=pre, attn_dropout_ratio=0.2, hidden_dropout_ratio=0.3, **flags).to(dtype)
        hidden, _ = batch(dtype)
        with saved_bytes() as found:
            out = layer(hidden)
        for param in layer.parameters():
            found.pop(param.untyped_storage().data_ptr(), None)
        assert sum(found.values()) == planned_bytes(layer, dtype.itemsize), flags
        del out


@pytest.mark.parametrize("pre", [False, True])
def test_a_gradient_need_not_lie_in_order(pre: bool) -> None:
    """A sum's is one number, expanded; a transposed product's has other strides."""
    hidden, seen = batch()
    layer = layer_of(pre_layer_norm=pre)
    weights = torch.randn(HIDDEN, TOKENS, SAMPLES, generator=torch.Generator().manual_seed(2))
    for loss in (lambda out: out.sum(), lambda out: (out.permute(2, 1, 0) * weights.to(out.dtype)).sum()):
        found, expected = (
            torch.autograd.grad(loss(out), [hidden, *layer.parameters()])
            for out in (layer(hidden, seen), reference(layer, hidden, seen, None))
        )
        scale = max(float(each.norm()) for each in expected)
        for one, other in zip(found, expected, strict=True):  # post-LN, a sum's gradient is nearly nothing
            assert float((one.double() - other.double()).norm()) < 2e-5 * scale


@pytest.mark.parametrize("pre", [False, True])
def test_without_dropout_nothing_is_drawn_and_nothing_kept_for_it(pre: bool) -> None:
    hidden, seen = batch()
    layer = layer_of(pre_layer_norm=pre)
    before = torch.get_rng_state()
    out = layer(hidden, seen)
    assert torch.equal(before, torch.get_rng_state())
    expected = reference(layer, hidden, seen, None)
    assert error(out, expected) < 1e-6
    for one, other in zip(gradients(out, hidden, layer), gradients(expected, hidden, layer), strict=True):
        assert error(one, other) < 5e-6


def test_evaluation_drops_nothing_and_a_mask_may_be_added() -> None:
    hidden, seen = batch()
    layer = layer_of(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.3).eval()
    expected = reference(layer, hidden, seen, None)
    added = torch.where(seen, 0.0, -10000.0)
    for mask in (seen, added):
        assert error(layer(hidden, mask), expected) < 1e-6
    with torch.no_grad():
        assert error(layer(hidden, added), expected) < 1e-6
    assert isinstance(layer_of(return_tuple=True)(hidden), tuple)
    assert not DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**SIZES, training=False)).training


def test_a_checkpointed_layer_drops_the_same_elements() -> None:
    """Gradients with the forward computed again equal those without, because seeds come from torch's generator."""
    hidden, seen = batch()
    layer = layer_of(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.3)
    torch.manual_seed(5)
    exact = gradients(layer(hidden, seen), hidden, layer)
    torch.manual_seed(5)
    found = gradients(checkpoint(layer, hidden, seen, use_reentrant=False), hidden, layer)
    for one, other in zip(found, exact, strict=True):
        assert torch.equal(one, other)


def test_half_precision_by_the_config_by_autocast_and_by_the_model() -> None:
    hidden, seen = batch()
    layer = layer_of()
    exact = reference(layer, hidden, seen, None)
    expected = gradients(exact, hidden, layer)
    with torch.autocast("cpu", torch.bfloat16):
        by_autocast = layer(hidden, seen)
    by_config = layer_of(bf16=True)(hidden, seen)
    by_model = copy.deepcopy(layer).bfloat16()(hidden.bfloat16(), seen)
    assert by_autocast.dtype is by_config.dtype is by_model.dtype is torch.bfloat16
    assert torch.equal(by_autocast, by_config)
    assert torch.equal(by_autocast, by_model)
    assert error(by_autocast, exact) < 0.01
    for one, other in zip(gradients(by_autocast, hidden, layer), expected, strict=True):
        assert one.dtype is torch.float32
        assert error(one, other) < 0.03


@pytest.mark.parametrize("pre", [False, True])
def test_what_torch_compile_gets_is_the_same_layer(pre: bool) -> None:
    """By the eager backend: the graph is what counts, and no compiler is needed."""
    hidden, seen = batch()
    layer = layer_of(pre_layer_norm=pre)
    expected = reference(layer, hidden, seen, None)
    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(hidden, seen)
    assert error(out, expected) < 1e-6
    for one, other in zip(gradients(out, hidden, layer), gradients(expected, hidden, layer), strict=True):
        assert error(one, other) < 5e-6
    torch._dynamo.reset()


@pytest.mark.parametrize("pre", [False, True])
def test_no_samples_and_no_tokens(pre: bool) -> None:
    layer = layer_of(pre_layer_norm=pre)
    width = layer.config.hidden_size
    for shape in ((0, 4, width), (2, 0, width)):
        layer.zero_grad()
        out = layer(torch.zeros(shape, requires_grad=True))
        out.sum().backward()
        assert out.shape == shape
        assert all(param.grad is not None and not param.grad.any() for param in layer.parameters())


def test_fresh_weights_and_given_ones() -> None:
    sizes = {**SIZES, "hidden_size": 256, "heads": 4, "intermediate_size": -1, "num_hidden_layers": 8}
    torch.manual_seed(0)
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**sizes))
    assert layer.config.intermediate_size == 1024
    for name, param in layer.named_parameters():
        if param.dim() == 1:
            assert torch.equal(param, torch.full_like(param, 1.0 if name in ("attn_nw", "norm_w") else 0.0))
        else:
            wanted = 0.2 / 4 if name in ("attn_ow", "output_w") else 0.2  # √(2 · 8) = 4
            assert float(param.detach().std()) == pytest.approx(wanted, rel=0.02)
    plain = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**sizes, adjust_init_range=False))
    assert float(plain.attn_ow.detach().std()) == pytest.approx(0.2, rel=0.02)
    assert plain.config.layer_id == layer.config.layer_id + 1
    source = layer_of()
    weights = [*source.attn_qkvw.chunk(3), source.attn_ow, source.attn_nw, source.inter_w, source.output_w, source.norm_w]
    biases = [*source.attn_qkvb.chunk(3), source.attn_ob, source.attn_nb, source.inter_b, source.output_b, source.norm_b]
    made = DeepSpeedTransformerLayer(source.config, weights, biases)
    for one, other in zip(made.parameters(), source.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()


def test_the_published_config_and_its_files(tmp_path: Path) -> None:
    """Names and defaults of DeepSpeed 0.19's class; it wrote its files in UTF-16."""
    made = DeepSpeedTransformerConfig(8, 64, -1, 4, 0.1, 0.1, 2, 0.02, 1e-12, -1, 3, True, False)
    assert (made.intermediate_size, made.seed, made.fp16, made.pre_layer_norm) == (256, 3, True, False)
    assert DeepSpeedTransformerConfig().pre_layer_norm
    values = {"hidden_size": 64, "heads": 4, "gelu_checkpoint": True}
    for encoding in ("utf-8", "utf-16"):
        (tmp_path / "layer.json").write_text(json.dumps(values), encoding=encoding)
        assert DeepSpeedTransformerConfig.from_json_file(str(tmp_path / "layer.json")).gelu_checkpoint
    with pytest.raises(BadInput, match=r"'gelu_checkpoints' is no key of it.*did you mean 'gelu_checkpoint'"):
        DeepSpeedTransformerConfig.from_dict({"gelu_checkpoints": True})
    (tmp_path / "layer.json").write_text("[1]")
    with pytest.raises(BadInput, match="it holds no JSON object"):
        DeepSpeedTransformerConfig.from_json_file(str(tmp_path / "layer.json"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": 5}, "5 heads do not divide hidden_size 32"),
        ({"heads": -1}, "heads: -1 is no size"),
        ({"hidden_dropout_ratio": 1.0}, "hidden_dropout_ratio: 1.0 drops everything"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: adjust_init_range divides by it"),
        ({"initializer_range": -1}, "initializer_range: -1 is no deviation"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are both set"),
        ({"gelu_approximate": "erf"}, "'erf' is no GELU"),
    ],
)
def test_a_config_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**{**SIZES, **options}))


def test_what_the_layer_does_not_do_is_refused() -> None:
    hidden, seen = batch()
    layer = layer_of()
    with pytest.raises(BadInput, match="head_mask: it is not supported"):
        layer(hidden, seen, torch.ones(HEADS))
    with pytest.raises(BadInput, match="output_attentions: it is not supported"):
        layer(hidden, output_attentions=True)
    with pytest.raises(BadInput, match="an attention_mask of 2 dimensions"):
        layer(hidden, seen[:, 0, 0])
    with pytest.raises(BadInput, match="hidden states of width 16, where hidden_size is 32"):
        layer(hidden[..., :16])
    with pytest.raises(BadInput, match="hidden states of 2 dimensions"):
        layer(hidden[0])
    with pytest.raises(BadInput, match=r"hidden states in torch.bfloat16 and parameters in torch.float32"):
        layer(hidden.bfloat16())
    with pytest.raises(BadInput, match=r"parameters in torch.bfloat16 cannot be used in torch.float16"):
        layer_of(fp16=True).bfloat16()(hidden)
    with pytest.raises(BadInput, match="7 initial tensors"):
        DeepSpeedTransformerLayer(layer.config, [torch.zeros(1)] * 7)
