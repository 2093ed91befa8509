"""Linear layers that multiply in 8-bit floats: their arithmetic, training with them, and gathers in 8 bits."""

from __future__ import annotations

import gc
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import RUNTIME_RECIPES, Float8Recipe
from zeroplan_runtime import parameter_aliases
from zeroplan_runtime.compiled import keep_out_of_graphs
from zeroplan_runtime.techniques.float8 import (
    Float8Product,
    attach_float8,
    float8_product_in_graph,
    narrow_blocks,
    narrow_parts,
    narrow_rows,
    narrow_tensor,
)

pytestmark = [pytest.mark.torch]

WIDTH, HIDDEN, TOKENS, BATCH, VOCAB = 32, 64, 6, 2, 61
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Block(nn.Module):
    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.odd = nn.Linear(WIDTH, WIDTH + 1) if odd else None  # stays in 16 bits
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.down(functional.gelu(self.up(y)))
        return x if self.odd is None else x + self.odd(y)[..., 1:]


class Model(nn.Module):
    def __init__(self, *, odd: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(odd=odd) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def model(*, odd: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(odd=odd)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(100 * step + rank))


def config(stage: int, recipe: str = "", **options: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "zeroplan": {"float8": recipe, "wide_numel": 500, **options},
    }


def rounded(x: torch.Tensor, part: tuple[int, int], kind: torch.dtype) -> torch.Tensor:
    """`x` rounded part by part, each by its own power of two, in fp64: the straight way."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], part[0]):
        for j in range(0, x.shape[1], part[1]):
            piece = x[i : i + part[0], j : j + part[1]].double()
            scale = 2.0 ** math.ceil(math.log2(max(piece.abs().max().item(), 2.0**-100) / torch.finfo(kind).max))
            out[i : i + part[0], j : j + part[1]] = (piece / scale).to(kind).double() * scale
    return out


@pytest.mark.parametrize("spread", [1.0, 1e-6, 3e4])
def test_values_are_rounded_by_the_least_power_of_two_of_their_part(spread: float) -> None:
    torch.manual_seed(3)
    x = (torch.randn(256, 384) * spread * torch.logspace(0, -3, 384)).bfloat16()
    x[3], x[:, 5] = 0.0, 0.0
    for found, part, kind in (
        (narrow_tensor(x), (256, 384), E4M3),
        (narrow_tensor(x, E5M2), (256, 384), E5M2),
        (narrow_rows(x), (1, 384), E4M3),
        (narrow_parts(x), (1, 128), E4M3),
        (narrow_blocks(x), (128, 128), E4M3),
    ):
        torch.testing.assert_close(found.widened().double(), rounded(x, part, kind), rtol=0, atol=0)
        assert found.bits.is_contiguous()
        again = narrow_tensor(found.widened().bfloat16(), kind) if part == (256, 384) else None
        if again is not None:  # rounding what is rounded changes nothing
            assert torch.equal(again.widened(), found.widened())


def test_what_is_not_finite_stays_so() -> None:
    for bad in (float("nan"), float("inf")):
        x = torch.ones(16, 16, dtype=torch.bfloat16)
        x[1, 2] = bad
        assert not torch.isfinite(narrow_tensor(x).widened()).all()
        assert not torch.isfinite(narrow_rows(x).widened()).all()


@pytest.mark.parametrize("recipe", RUNTIME_RECIPES)
@pytest.mark.parametrize("tokens", [32, 21])
def test_products_and_gradients_are_those_of_rounded_factors(recipe: Float8Recipe, tokens: int) -> None:
    """Beside a reference in fp64 whose factors are rounded the straight way."""
    torch.manual_seed(1)
    rows, inner = (512, 1024) if recipe is Float8Recipe.BLOCKWISE else (48, 32)
    x, weight, grad = (
        torch.randn(tokens, inner).bfloat16(),
        torch.randn(rows, inner).bfloat16(),
        torch.randn(tokens, rows).bfloat16(),
    )
    bias = torch.randn(rows).bfloat16()
    leaves = [one.clone().requires_grad_() for one in (x, weight, bias)]
    out: Any = Float8Product.apply(*leaves, recipe, False)
    grads = torch.autograd.grad(out, leaves, grad)

    def side(one: torch.Tensor, *, of_weight: bool = False, kind: torch.dtype = E4M3) -> torch.Tensor:
        parts = {
            Float8Recipe.TENSORWISE: tuple(one.shape),
            Float8Recipe.ROWWISE: (1, one.shape[1]),
            Float8Recipe.BLOCKWISE: (128, 128) if of_weight else (1, 128),
        }
        return rounded(one, parts[recipe], kind)

    kind = E5M2 if recipe is Float8Recipe.TENSORWISE else E4M3
    expected = side(x) @ side(weight, of_weight=True).t() + bias.double()
    grad_x = side(grad, kind=kind) @ side(weight.t(), of_weight=True).t()
    grad_w = side(grad.t(), kind=kind) @ side(x.t()).t()
    for found, right in zip((out, *grads), (expected, grad_x, grad_w, grad.double().sum(0)), strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - right).norm() <= 4e-3 * right.norm()  # bf16's own rounding, of sums in fp32


def train(group: torch.distributed.ProcessGroup, setting: dict[str, Any], odd: bool = True, steps: int = 4) -> dict[str, Any]:
    rank = torch.distributed.get_rank(group)
    engine, *_ = zeroplan_runtime.initialize(model=model(odd=odd), config=setting, group=group, device="cpu")
    losses = []
    with mock.patch.object(parameter_aliases.gc, "get_objects", side_effect=gc.get_objects) as search:
        for step in range(steps):
            loss = engine(batch(step, rank))
            losses.append(float(loss))
            engine.backward(loss)
            engine.step()
    assert not search.called  # nothing that a product keeps looks like an alias of a parameter
    sent = engine.comm.sent_bytes
    seen = {}
    if engine.model_states.float8_gathers is not None:
        for unit in engine.model_states.units[1:4]:
            engine.schedule.unshard(unit)
            seen |= {unit.name_of(i): view.clone() for i, view in enumerate(unit.trainable.views(unit.trainable.full))}
    layout = engine.model_states.layout
    found = {"losses": losses, "params": engine.module_state_dict(), "seen": seen, "sent": sent}
    found["rows"] = engine.arena.measurement()
    found["planned"] = {(row.buffer, row.unit): row.bytes for row in runtime_buffers(layout)}
    after = float(engine(batch(9, rank)))
    engine.destroy()
    return found | {"after": after}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_stages_train_alike(pool: RankPool, recipe: str) -> None:
    """Two ranks with all stages: what is rounded is whole weights, so no stage changes it."""
    one = pool.run(2, train, config(1, recipe))
    three = pool.run(2, train, config(3, recipe))
    plain = pool.run(2, train, config(3))
    assert [r["losses"] for r in three] == [r["losses"] for r in one]
    for name, value in one[0]["params"].items():
        assert torch.equal(three[0]["params"][name], value), name
    assert plain[0]["losses"] != one[0]["losses"]
    assert plain[0]["losses"] == pytest.approx(one[0]["losses"], rel=0.02)


def test_gathers_in_8_bits(pool: RankPool) -> None:
    """Forwards see rounded matrices and exact vectors; whoever else reads them sees them as they are; fewer bytes are sent."""
    narrow = pool.run(2, train, config(3, "tensorwise", float8_gathers=True), False)
    wide = pool.run(2, train, config(3, "tensorwise"), False)
    assert [r["losses"] for r in narrow] == [pytest.approx(r["losses"], rel=0.02) for r in wide]
    seen, exact = narrow[0]["seen"], narrow[0]["params"]
    assert len(seen) == 3 * 5
    for name, value in seen.items():
        assert torch.equal(value, narrow[1]["seen"][name])
        assert torch.equal(value, exact[name]) is (value.dim() == 1), name
        assert (value - exact[name]).abs().max() <= 2.0**-4 * exact[name].abs().max()
    assert narrow[0]["sent"] < wide[0]["sent"]
    rows = {(row["buffer"], row["unit"]): row["peak"] for row in narrow[0]["rows"]}
    assert rows[Buffer.COMM_ALL_GATHER, "float8"] == narrow[0]["planned"][Buffer.COMM_ALL_GATHER, "float8"] > 0
    assert rows == narrow[0]["planned"]
    assert narrow[0]["after"] != narrow[1]["after"]  # other batches; and a read before did not disturb the forward


def test_blocks_at_the_ends_stay_in_bf16(pool: RankPool) -> None:
    """Of three blocks the middle one alone multiplies, and is gathered, in 8 bits; all buffers are as planned."""
    ends = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    found = pool.run(2, train, config(3, "tensorwise", float8_gathers=True, **ends), False)[0]
    for name, value in found["seen"].items():
        assert torch.equal(value, found["params"][name]) is ("blocks.1." not in name or value.dim() == 1), name
    assert {(row["buffer"], row["unit"]): row["peak"] for row in found["rows"]} == found["planned"]
    one, three = (pool.run(2, train, config(stage, "tensorwise", **ends))[0]["losses"] for stage in (1, 3))
    assert one == three
    net = model().bfloat16()
    undo = attach_float8([net.blocks[1]], Float8Recipe.TENSORWISE, torch.device("cpu"))
    expected = float(net(batch(0, 0)))
    undo()
    engine, *_ = zeroplan_runtime.initialize(model=model(), config=config(1, "tensorwise", **ends), device="cpu")
    assert float(engine(batch(0, 0))) == expected
    engine.destroy()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_blocks(recipe: str) -> None:
    torch.manual_seed(0)
    one, two = Block(odd=False).bfloat16(), Block(odd=False).bfloat16()
    two.load_state_dict(one.state_dict())
    for block in (one, two):
        attach_float8([block], Float8Recipe(recipe), torch.device("cpu"))
    keep_out_of_graphs([])  # as the engine's first forward does
    compiled = torch.compile(two, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8, WIDTH).bfloat16()
    for made in (one(x), compiled(x)):
        made.float().square().mean().backward()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=1e-4)


def test_a_graph_has_a_product_as_one_node() -> None:
    """A checkpoint around it marks that node, and with it all that AOTAutograd makes of it; see Note [Graphs]."""
    block = Block(odd=False).bfloat16()
    attach_float8([block], Float8Recipe.TENSORWISE, torch.device("cpu"))
    keep_out_of_graphs([])
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(block, backend=backend, fullgraph=True)(torch.randn(2, 8, WIDTH).bfloat16())
    assert seen.count(float8_product_in_graph) == 2
    assert not any("autograd_function" in str(target) for target in seen)


def test_layers_have_their_own_forwards_again() -> None:
    net = model().bfloat16()
    expected = net(batch(0, 0))
    undo = attach_float8(list(net.blocks), Float8Recipe.TENSORWISE, torch.device("cpu"))
    assert net(batch(0, 0)) != expected
    undo()
    assert net(batch(0, 0)) == expected
    assert "forward" not in vars(net.blocks[0].up)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"zeroplan": {"float8": "columnwise"}}, "no recipe is called 'columnwise'.*tensorwise, rowwise or blockwise"),
        ({"zeroplan": {"float8": "rowwise_with_gw_hp"}}, "no recipe is called"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "stand in for bf16's, not fp16's"),
        ({"zeroplan": {"float8": "rowwise", "float8_gathers": True}}, "gathers in 8 bits are of tensorwise products"),
        ({"zero_optimization": {"stage": 2}, "zeroplan": {"float8": "tensorwise", "float8_gathers": True}}, "at stage 3"),
        ({"zeroplan": {"float8": "blockwise"}}, "sizes are multiples of 512"),
        ({"zeroplan": {"num_layers_at_end_in_bf16": 1}}, "all layers are in 16 bits without float8"),
        ({"zeroplan": {"float8": "tensorwise", "num_layers_at_end_in_bf16": 3}}, "no block of the model's 3 is left"),
    ],
)
def test_refusals(change: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        zeroplan_runtime.initialize(model=model(), config=config(3, "tensorwise") | change, device="cpu")


def refused(group: torch.distributed.ProcessGroup) -> list[str]:
    found = []
    setting = config(3, "tensorwise", float8_gathers=True)
    try:
        net = model(odd=False)
        net.blocks[1].mix = nn.Parameter(torch.ones(16, 16))
        zeroplan_runtime.initialize(model=net, config=setting, group=group, device="cpu")
    except BadInput as fault:
        found.append(str(fault))
    engine, *_ = zeroplan_runtime.initialize(model=model(odd=False), config=setting, group=group, device="cpu")

    def write(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            module.up.weight.mul_(2)

    engine.module.blocks[0].register_forward_pre_hook(write)
    try:
        engine(batch(0, 0))
    except BadInput as fault:
        found.append(str(fault))
    engine.destroy()
    return found


def test_what_gathers_in_8_bits_refuse(pool: RankPool) -> None:
    (other, written) = pool.run(2, refused)[0]
    assert "'blocks.1.mix' would be gathered in 8 bits, and is no plain linear layer's" in other
    assert "was written to where it is gathered in 8 bits" in written
