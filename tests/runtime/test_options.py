"""Options one by one, each at every stage on two ranks: the runtime equals plain torch."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ADAMW, distance, ds_config, dtype_of, loss_distance, train_all
from zeroplan.core.arena import layout
from zeroplan.core.errors import BadInput

STEPS = 3


def compare(
    pool: RankPool,
    *,
    model: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    dtype: str = "fp32",
    ranks: int = 2,
    optimizer: Any = None,
    bound: float = 0.0,
    stages: tuple[int, ...] = (0, 1, 2, 3),
    **plain_options: Any,
) -> list[dict[str, Any]]:
    """Trains under every stage and in plain torch; returns the first rank's results by stage."""
    optimizer = optimizer or (lambda p: models.RoundedAdamW(p, lr=1e-2, weight_decay=0.1))
    plain = models.Plain(models.make(**(model or {})), optimizer, ranks, dtype=dtype_of(dtype), **plain_options)
    expected = [plain.step(number) for number in range(STEPS)]
    cases = [(ds_config(stage, dtype, **(changes or {})), model or {}) for stage in stages]
    results = pool.run(ranks, train_all, cases, STEPS)
    for i, stage in enumerate(stages):
        assert loss_distance([rank[i] for rank in results], expected) <= bound, stage
        if not bound:
            assert distance(results[0][i], plain) == 0, stage
        else:
            assert results[0][i]["norm"] is None or results[0][i]["norm"] == pytest.approx(plain.norm, rel=1e-3)
    return results[0]


ALONE: tuple[dict[str, Any], ...] = ({"tied": True}, {"unused": True}, {"remat": "reentrant"}, {"remat": "plain"})
TOGETHER: tuple[dict[str, Any], ...] = ({"tied": True, "remat": "plain"}, {"unused": True, "remat": "reentrant"})


@pytest.mark.parametrize("model", [*TOGETHER, *(pytest.param(model, marks=pytest.mark.long) for model in ALONE)], ids=str)
def test_models(pool: RankPool, model: dict[str, Any]) -> None:
    compare(pool, model=model)


@pytest.mark.parametrize("zeroplan", [{"direct_linear": False}, {"wide_numel": 10**9}, {"ring": 3}], ids=str)
def test_own_keys_change_no_number(pool: RankPool, zeroplan: dict[str, Any]) -> None:
    compare(pool, changes={"zeroplan": zeroplan}, stages=(2, 3))


def test_clipping(pool: RankPool) -> None:
    # The norm is summed in another order than torch's, so the clip factor may differ in its last bits.
    results = compare(pool, changes={"gradient_clipping": 0.05}, clip=0.05, bound=2e-6)
    assert results[0]["norm"] > 0.05


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_accumulation(pool: RankPool, dtype: str, bound: float) -> None:
    # Stages 2 and 3 average each micro batch over the ranks before adding, plain torch adds first.
    compare(pool, changes={"gradient_accumulation_steps": 3}, accum=3, dtype=dtype, bound=bound)


def test_accumulation_in_fp32_is_closer_than_in_bf16(pool: RankPool) -> None:
    """What `grad_accum_dtype` is for: the sum of 16 micro batches, against the same sum in fp64."""
    plain = models.Plain(models.make(), lambda p: torch.optim.SGD(p, lr=1.0), accum=1, dtype=torch.bfloat16)
    exact: dict[str, torch.Tensor] = {}
    for micro in range(16):
        (plain.model(models.batch(0, micro, 0)) / 16).backward()
        for name, p in plain.params.items():
            exact[name] = exact.get(name, 0) + p.grad.double()
            p.grad = None
    errors = {}
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "gradient_accumulation_steps": 16}
    for accum in ("bf16", "fp32"):
        changes = {**sgd, "data_types": {"grad_accum_dtype": accum}}
        (grads,) = pool.run(1, first_gradients, ds_config(2, "bf16", **changes))
        errors[accum] = max(((grads[n].double() - g).abs().max() / g.abs().max()).item() for n, g in exact.items())
    assert errors["fp32"] < 1e-3 < errors["bf16"]


def first_gradients(group: dist.ProcessGroup, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, group=group, device="cpu")
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(models.batch(0, micro, 0)))
        if micro + 1 < engine.gradient_accumulation_steps():
            engine.step()
    found = {}
    for unit in engine.model_states.units:
        for i, view in zip(unit.trainable.layout.params, unit.grads.views, strict=True):
            found[unit.layout.shape.params[i].name] = view.clone()
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_reduction_in_fp32(pool: RankPool, ranks: int) -> None:
    """bf16 gradients are cast on arrival, so the mean over the ranks is that of fp32 numbers."""
    compare(pool, changes={"communication_data_type": "fp32"}, dtype="bf16", ranks=ranks, bound=3e-2)


def train_in_pieces(group: dist.ProcessGroup, numel: int, config: dict[str, Any]) -> Any:
    usual, layout.STAGING_NUMEL = layout.STAGING_NUMEL, numel
    try:
        return train_all(group, [(config, {})], STEPS)[0]
    finally:
        layout.STAGING_NUMEL = usual


@pytest.mark.parametrize("accum", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_size_of_the_staging_buffer_changes_no_number(pool: RankPool, accum: int) -> None:
    config = ds_config(3, "bf16", communication_data_type="fp32", gradient_accumulation_steps=accum)
    small, large = (pool.run(2, train_in_pieces, numel, config)[0] for numel in (256, 1 << 20))
    assert small["losses"] == large["losses"]
    staged = [next(row["peak"] for row in found["rows"] if row["unit"] == "staging") for found in (small, large)]
    assert staged[0] == 4 * 256 < staged[1]


@pytest.mark.parametrize(
    ("section", "plain"),
    [
        (
            {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.1}},
            (torch.optim.Adam, {"weight_decay": 0.1}),
        ),
        ({"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}}, (torch.optim.AdamW, {"weight_decay": 0.1})),
        ({"type": "SGD", "params": {"lr": 1e-2}}, (torch.optim.SGD, {})),
        (
            {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}},
            (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ),
        (
            {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}},
            (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        ),
    ],
    ids=["adam", "adam_as_adamw", "sgd", "nesterov", "dampening"],
)
def test_optimizers_of_torch(pool: RankPool, section: dict[str, Any], plain: tuple[Any, dict[str, Any]]) -> None:
    kind, options = plain
    compare(pool, changes={"optimizer": section}, optimizer=lambda p: kind(p, lr=1e-2, **options), bound=5e-6, stages=(0, 3))


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, in fp64."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.float64))
            g, w = p.grad.double(), p.double()
            p.copy_(w - 1e-3 * ((0.9 * m + 0.1 * g).sign() + 0.1 * w))
            m.mul_(0.95).add_(0.05 * g)


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, with DeepSpeed's bounds on the trust ratio and its bias correction, in fp64."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(t=0, m=torch.zeros_like(p, dtype=torch.float64), v=torch.zeros_like(p, dtype=torch.float64))
            state["t"] += 1
            g, w, m, v = p.grad.double(), p.double(), state["m"], state["v"]
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            u = m / (v.sqrt() + 1e-8) + 0.1 * w
            trust = (w.norm() / u.norm()).clamp(0.01, 10.0) if w.norm() > 0 and u.norm() > 0 else 1.0
            rate = 1e-2 * (1 - 0.999 ** state["t"]) ** 0.5 / (1 - 0.9 ** state["t"])
            p.copy_(w - rate * trust * u)


@pytest.mark.parametrize("ranks", [1, 3])
def test_lion(pool: RankPool, ranks: int) -> None:
    section = {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    # A sign that flips where the sum is about zero moves a weight by 2 lr.
    compare(pool, changes={"optimizer": section}, optimizer=Lion, ranks=ranks, bound=1e-4, stages=(0, 2, 3))


@pytest.mark.parametrize("ranks", [1, 3])
def test_lamb_takes_the_norms_of_whole_parameters(pool: RankPool, ranks: int) -> None:
    section = {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    compare(pool, changes={"optimizer": section}, optimizer=Lamb, ranks=ranks, bound=1e-5, stages=(0, 2, 3))


def lamb_in_groups(group: dist.ProcessGroup, stage: int) -> Any:
    model = models.make()
    groups = [{**g, "weight_decay": 0.1} for g in groups_of(model)]
    config = ds_config(stage, optimizer={"type": "Lamb"})
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, model_parameters=groups, group=group, device="cpu")
    for number in range(STEPS):
        engine.backward(engine(models.batch(number, 0, dist.get_rank(group))))
        engine.step()
    return engine.module_state_dict()


def test_lamb_where_some_ranks_have_nothing_of_a_group(pool: RankPool) -> None:
    """Biases and norms lie last in their units, on the last rank: the others add nothing to their norms, at any step."""
    plain = models.Plain(models.make(), Lamb, 3)
    for number in range(STEPS):
        plain.step(number)
    for stage in (0, 3):
        params = pool.run(3, lamb_in_groups, stage)[0]
        for name, p in plain.model.state_dict().items():
            torch.testing.assert_close(params[name], p, rtol=0, atol=2e-5)


def grouped(group: dist.ProcessGroup, stage: int, given: bool) -> tuple[list[float], Any]:
    """Trains with decay on matrices only, and one rate halved half-way."""
    model = models.make()
    groups = groups_of(model)
    optimizer = torch.optim.AdamW(groups, lr=1e-2) if given else None
    config = ds_config(stage)
    engine, mine, _, _ = zeroplan_runtime.initialize(
        model=model, config=config, model_parameters=None if given else groups, optimizer=optimizer, group=group, device="cpu"
    )
    losses = []
    for number in range(STEPS):
        if number == STEPS // 2:
            (optimizer if given else mine).param_groups[0]["lr"] = 5e-3
        losses.append(engine.backward(engine(models.batch(number, 0, dist.get_rank(group)))).item())
        engine.step()
    return losses, engine.module_state_dict()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.2, "lr": 1e-2},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-2},
    ]


@pytest.mark.parametrize("given", [False, True], ids=["config", "torch"])
def test_parameter_groups(pool: RankPool, given: bool) -> None:
    plain = models.make()
    optimizer = torch.optim.AdamW(groups_of(plain), lr=1e-2)
    for number in range(STEPS):
        if number == STEPS // 2:
            optimizer.param_groups[0]["lr"] = 5e-3
        optimizer.zero_grad()
        for rank in range(2):
            (plain(models.batch(number, 0, rank)) / 2).backward()
        optimizer.step()
    for stage in range(4):
        (_, params), _ = pool.run(2, grouped, stage, given)
        for name, p in plain.state_dict().items():
            torch.testing.assert_close(params[name], p, rtol=0, atol=2e-5)


def frozen(group: dist.ProcessGroup, stage: int) -> Any:
    model = freeze(models.make())
    engine, *_ = zeroplan_runtime.initialize(model=model, config=ds_config(stage, "bf16"), group=group, device="cpu")
    losses = []
    for number in range(STEPS):
        losses.append(engine.backward(engine(models.batch(number, 0, dist.get_rank(group)))).item())
        engine.step()
    return {"losses": losses, "params": engine.module_state_dict(), "rows": engine.arena.measurement()}


def freeze(model: models.Tiny) -> models.Tiny:
    """Freezes the embedding, one block whole, and the linear layers of another."""
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].mix.requires_grad_(False)
    model.blocks[2].down.requires_grad_(False)
    return model


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_parameters(pool: RankPool, ranks: int) -> None:
    plain = models.Plain(
        freeze(models.make()), lambda p: models.RoundedAdamW(p, lr=1e-2, weight_decay=0.1), ranks, dtype=torch.bfloat16
    )
    expected = [plain.step(number) for number in range(STEPS)]
    for stage in range(4):
        results = pool.run(ranks, frozen, stage)
        assert loss_distance(results, expected) == 0, stage
        assert distance(results[0], plain) == 0, stage
        masters = {row["unit"] for row in results[0]["rows"] if row["buffer"] == "param.master"}
        assert masters == {"root", "blocks.0", "blocks.2", "blocks.3", "blocks.4", "head"}  # no state for what is frozen


def two_forwards(group: dist.ProcessGroup, stage: int) -> list[float]:
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(stage), group=group, device="cpu")
    losses = []
    for number in range(STEPS):
        rank = dist.get_rank(group)
        loss = engine(models.batch(number, 0, rank)) + engine(models.batch(number, 1, rank))
        losses.append(engine.backward(loss).item())
        engine.step()
    return losses


def test_two_forwards_before_one_backward(pool: RankPool) -> None:
    plain = models.make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    expected = []
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            loss = plain(models.batch(number, 0, rank)) + plain(models.batch(number, 1, rank))
            (loss / 2).backward()
            if rank == 0:
                expected.append(loss.item())
        optimizer.step()
    for stage in range(4):
        assert pool.run(2, two_forwards, stage)[0] == pytest.approx(expected, abs=1e-5), stage


class Shared(nn.Module):
    """One block used three times, and a parameter of the root used inside the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.ModuleList([models.Block(8, 13), models.Block(8, 13)])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            for block in self.shared:
                x = block(x) * self.scale
        return x.square().mean()


def train_shared(group: dist.ProcessGroup, stage: int) -> Any:
    torch.manual_seed(0)
    engine, *_ = zeroplan_runtime.initialize(model=Shared(), config=ds_config(stage), group=group, device="cpu")
    for number in range(STEPS):
        torch.manual_seed(10 * number + dist.get_rank(group))
        engine.backward(engine(torch.randn(2, 5, 8)))
        engine.step()
    return engine.module_state_dict()


def test_blocks_used_several_times(pool: RankPool) -> None:
    torch.manual_seed(0)
    plain = Shared()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            torch.manual_seed(10 * number + rank)
            (plain(torch.randn(2, 5, 8)) / 2).backward()
        optimizer.step()
    for stage in range(4):
        params = pool.run(2, train_shared, stage)[0]
        for name, p in plain.state_dict().items():
            torch.testing.assert_close(params[name], p, rtol=0, atol=1e-4)


def test_adamw_defaults_are_deepspeeds() -> None:
    engine_config = {**ds_config(0), "optimizer": {"type": "AdamW"}}
    _, optimizer, _, _ = zeroplan_runtime.initialize(model=nn.Linear(2, 2), config=engine_config, device="cpu")
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    assert ADAMW["params"]["weight_decay"] == 0.1


def read_state_dict(group: dist.ProcessGroup, stage: int) -> str:
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(stage), group=group, device="cpu")
    try:
        state = engine.module.state_dict()
    except BadInput as fault:
        return str(fault)
    whole = engine.module_state_dict()
    return "" if whole is None else str(all((state[name] == value).all().item() for name, value in whole.items()))


def test_a_sharded_state_dict_is_refused_not_wrong(pool: RankPool) -> None:
    assert pool.run(2, read_state_dict, 2)[0] == "True"
    assert all("use engine.module_state_dict()" in said for said in pool.run(2, read_state_dict, 3))
    assert pool.run(1, read_state_dict, 3) == ["True"]


def abandon(group: dist.ProcessGroup, stage: int) -> list[bool]:
    """Trains, lets go of the engine and its model, and says what is still there of its memory."""
    engine = zeroplan_runtime.initialize(model=models.make(), config=ds_config(stage), group=group, device="cpu")[0]
    engine.backward(engine(models.batch(0, 0, 0)))
    kept = [weakref.ref(engine), weakref.ref(engine.module)]
    for unit in engine.model_states.units:
        tensors = [unit.grad, unit.master, *(flat.full for flat in unit.flats())]
        kept += [weakref.ref(t.untyped_storage()) for t in tensors if t is not None]
    del engine, tensors, unit
    gc.collect()
    return [reference() is not None for reference in kept]


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_an_engine_that_nobody_holds_is_collected(pool: RankPool, ranks: int, stage: int) -> None:
    for there in pool.run(ranks, abandon, stage):
        assert len(there) > 10
        assert not any(there)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (3, "fp32")])
def test_destroy_gives_all_memory_back(stage: int, dtype: str) -> None:
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(stage, dtype), device="cpu")
    engine.backward(engine(models.batch(0, 0, 0)))
    engine.step()
    kept = []
    for unit in engine.model_states.units:
        flats = [tensor for flat in unit.flats() for tensor in (flat.full, flat.shard)]
        states = [state for state in unit.optim_states.values() if isinstance(state, torch.Tensor)]
        assert states
        kept += [weakref.ref(t.untyped_storage()) for t in (*flats, unit.master, *states) if t is not None]
    del unit, flats, states
    sizes = [p.numel() for p in engine.module.parameters()]
    engine.destroy()
    assert sum(sizes) > 0
    assert [p.numel() for p in engine.module.parameters()] == [0] * len(sizes)
    gc.collect()
    assert all(reference() is None for reference in kept)
