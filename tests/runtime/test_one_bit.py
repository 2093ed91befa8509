"""1-bit Adam: its warm-up is Adam, its compression stage a plain simulation of the algorithm, and its traffic a sixteenth."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.gpu_ranks import run_on_gpus
from tests.runtime.ranks import RankPool
from tests.runtime.train import ADAMW, ds_config, train
from zeroplan.core.errors import BadInput
from zeroplan.core.one_bit import SCALE_BLOCK
from zeroplan_runtime.engine import Engine
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer

FREEZE, STEPS = 3, 8


def config_of(stage: int, dtype: str = "fp32", freeze_step: int = FREEZE, **changes: Any) -> dict[str, Any]:
    params = {**ADAMW["params"], "freeze_step": freeze_step, "cuda_aware": False, "comm_backend_name": "nccl"}
    return ds_config(stage, dtype, optimizer={"type": "OneBitAdam", "params": params}, **changes)


def zero_one_config(stage: int, freeze_step: int = 6, updates: int = 2, **changes: Any) -> dict[str, Any]:
    params = {**ADAMW["params"], "var_freeze_step": freeze_step, "var_update_scaler": updates}
    return ds_config(stage, optimizer={"type": "ZeroOneAdam", "params": params}, **changes)


def start(group: dist.ProcessGroup, config: dict[str, Any], model: nn.Module | None = None) -> Engine:
    model = models.make() if model is None else model
    return zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")[0]


def run(engine: Engine, group: dist.ProcessGroup, numbers: range, factor: float = 1.0) -> list[float]:
    losses = []
    for number in numbers:
        loss = engine(models.batch(number, 0, dist.get_rank(group)))
        losses.append(engine.backward(loss * factor).item())
        engine.step()
    engine.finish_step()
    return losses


def states_of(engine: Engine) -> list[dict[str, torch.Tensor]]:
    """By unit: masters, second moment, momentum and errors, as they lie in the flats."""
    return [
        {
            "master": unit.master.clone(),
            **{buffer.value: tensor.clone() for buffer, tensor in unit.optim_states.items()},
            "momentum": unit.exchanged.momentum.clone(),
            "worker": unit.exchanged.worker_error.clone(),
            "server": unit.exchanged.server_error.clone(),
        }
        for unit in engine.model_states.units
        if unit.exchanged is not None and unit.master is not None
    ]


# ---------------------------------------------------------------------- the algorithm


def compress(values: torch.Tensor) -> torch.Tensor:
    """Every block's signs times its mean magnitude."""
    parts = []
    for block in values.split(SCALE_BLOCK):
        scale = torch.tensor(math.fsum(block.double().abs().tolist()) / len(block)).float()
        parts.append(torch.where(block >= 0, scale, -scale))
    return torch.cat(parts)


class Simulation:
    """1-bit Adam's compression stage (Tang et al. 2021, algorithm 1) of all ranks in one process, over the engine's flats."""

    def __init__(self, ranks: int, layout: Any, states: list[dict[str, torch.Tensor]]) -> None:
        self.ranks, self.flats = ranks, [unit.trainable for unit in layout.units]
        self.names = [[unit.shape.params[i].name for i in unit.trainable.params] for unit in layout.units]
        self.states, self.model = states, models.make()
        self.worker = [[torch.zeros(flat.full) for _ in range(ranks)] for flat in self.flats]
        self.server = [[torch.zeros(flat.shard) for _ in range(ranks)] for flat in self.flats]

    def gradients(self, number: int, rank: int) -> list[torch.Tensor]:
        params = dict(self.model.named_parameters())
        with torch.no_grad():
            for flat, names, state in zip(self.flats, self.names, self.states, strict=True):
                for name, begin, numel in zip(names, flat.offsets, flat.numels, strict=True):
                    params[name].copy_(state["master"][begin : begin + numel].view_as(params[name]))
                    params[name].grad = None
        self.model(models.batch(number, 0, rank)).backward()
        made = [torch.zeros(flat.full) for flat in self.flats]
        for flat, names, whole in zip(self.flats, self.names, made, strict=True):
            for name, begin, numel in zip(names, flat.offsets, flat.numels, strict=True):
                if params[name].grad is not None:
                    whole[begin : begin + numel] = params[name].grad.view(-1)
        return made

    def root2(self, number: int) -> float:
        return 1 / math.sqrt(1 - 0.999**FREEZE)

    @torch.no_grad()
    def added(self, number: int, decay: float) -> list[torch.Tensor]:
        """The compressed mean of decay · momentum + (1 − decay) · gradient, by unit."""
        with torch.enable_grad():
            grads = [self.gradients(number, rank) for rank in range(self.ranks)]
        made = []
        for u, (flat, state) in enumerate(zip(self.flats, self.states, strict=True)):
            used = self.used(u)
            sent = []
            for rank in range(self.ranks):
                c = state["momentum"] * decay + grads[rank][u] * (1 - decay) + self.worker[u][rank]
                sent.append(torch.cat([compress(chunk) for chunk in c.split(flat.shard)]))
                self.worker[u][rank] = (c - sent[-1]) * used
            means = []
            for rank in range(self.ranks):
                part = slice(rank * flat.shard, (rank + 1) * flat.shard)
                mean = torch.zeros(flat.shard)
                for other in sent:
                    mean += other[part]
                c = mean * (1 / self.ranks) + self.server[u][rank]
                means.append(compress(c))
                self.server[u][rank] = (c - means[-1]) * used[part]
            made.append(torch.cat(means) * used)
        return made

    def used(self, u: int) -> torch.Tensor:
        """1 where parameters are, 0 in the padding."""
        flat = self.flats[u]
        made = torch.zeros(flat.full)
        for begin, numel in zip(flat.offsets, flat.numels, strict=True):
            made[begin : begin + numel] = 1
        return made

    def apply(self, u: int, number: int) -> None:
        """Adam's step with the present moments."""
        state = self.states[u]
        rate, keep = 1e-2 / (1 - 0.9 ** (number + 1)), 1 - 1e-2 * 0.1
        v = state["optim.exp_avg_sq"]
        denominator = v.double().sqrt().float() * self.root2(number) + 1e-8
        direction = torch.where(v == 0, 0.0, state["momentum"] / denominator)
        state["master"] = state["master"] * keep - direction * rate

    def step(self, number: int) -> None:
        for u, momentum in enumerate(self.added(number, 0.9)):
            self.states[u]["momentum"] = momentum
            self.apply(u, number)


def train_twice(group: dist.ProcessGroup, config: dict[str, Any]) -> dict[str, Any]:
    engine = start(group, config)
    losses = run(engine, group, range(FREEZE))
    warm = states_of(engine)
    losses += run(engine, group, range(FREEZE, STEPS))
    return {
        "warm": warm,
        "last": states_of(engine),
        "layout": engine.model_states.layout,
        "losses": losses,
        "params": engine.module_state_dict(),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_compression_stage_equals_a_simulation(pool: RankPool, ranks: int) -> None:
    results = pool.run(ranks, train_twice, config_of(0, zeroplan={"wide_numel": 500}))
    plain = Simulation(ranks, results[0]["layout"], [dict(state) for state in results[0]["warm"]])
    for number in range(FREEZE, STEPS):
        plain.step(number)
    for u, state in enumerate(plain.states):
        for rank, result in enumerate(results):
            found = result["last"][u]
            for key in ("master", "momentum", "optim.exp_avg_sq"):
                assert torch.equal(found[key], state[key]), (u, rank, key)
            assert torch.equal(found["worker"], plain.worker[u][rank]), (u, rank)
            assert torch.equal(found["server"], plain.server[u][rank]), (u, rank)
            assert found["worker"].any()
            assert found["server"].any() or rank > 0  # a late shard may be all padding


class ZeroOneSimulation(Simulation):
    """0/1 Adam (Lu et al. 2022, algorithm 1) without local steps, κ = 2 and f = 6: the second moment is updated in steps 1, 2,
    4 and 6, the gradient compressed in 3 and 5, the momentum from 7 on.
    """

    UPDATES = (1, 2, 4, 6)

    def step(self, number: int) -> None:
        if number + 1 > 6:
            if number + 1 == 7:  # errors of gradients are none of momentum
                self.worker = [[torch.zeros_like(one) for one in unit] for unit in self.worker]
                self.server = [[torch.zeros_like(one) for one in unit] for unit in self.server]
            super().step(number)
        elif number + 1 in self.UPDATES:
            self.update(number)
        else:
            self.exchange_gradients(number)

    def root2(self, number: int) -> float:
        done = sum(one <= number + 1 for one in self.UPDATES)
        return 1 / math.sqrt(1 - 0.999**done)

    def exchange_gradients(self, number: int) -> None:
        before = [state["momentum"] for state in self.states]
        for state in self.states:
            state["momentum"] = torch.zeros_like(state["momentum"])
        means = self.added(number, 0.0)
        for u, (state, m) in enumerate(zip(self.states, before, strict=True)):
            state["momentum"] = torch.where(state["optim.exp_avg_sq"] == 0, 0.0, m * 0.9 + means[u] * (1 - 0.9))
            self.apply(u, number)

    @torch.no_grad()
    def update(self, number: int) -> None:
        with torch.enable_grad():
            grads = [self.gradients(number, rank) for rank in range(self.ranks)]
        for u, state in enumerate(self.states):
            g = sum(grads[rank][u] for rank in range(self.ranks)) / self.ranks
            state["momentum"] = state["momentum"] * 0.9 + g * (1 - 0.9)
            state["optim.exp_avg_sq"] = state["optim.exp_avg_sq"] * 0.999 + g * (1 - 0.999) * g
            self.apply(u, number)


def train_from_the_start(group: dist.ProcessGroup, config: dict[str, Any]) -> dict[str, Any]:
    engine = start(group, config)
    first = states_of(engine)
    run(engine, group, range(STEPS))
    return {"first": first, "last": states_of(engine), "layout": engine.model_states.layout}


def test_zero_one_adam_equals_a_simulation(pool: RankPool) -> None:
    results = pool.run(2, train_from_the_start, zero_one_config(0))
    plain = ZeroOneSimulation(2, results[0]["layout"], [dict(state) for state in results[0]["first"]])
    for number in range(STEPS):
        plain.step(number)
    for u, state in enumerate(plain.states):
        for rank, result in enumerate(results):
            for key in ("master", "momentum", "optim.exp_avg_sq"):
                assert torch.equal(result["last"][u][key], state[key]), (u, rank, key)
            assert torch.equal(result["last"][u]["worker"], plain.worker[u][rank]), (u, rank)


@pytest.mark.long
def test_the_warm_up_is_adam_and_stage_1_equals_stage_0(pool: RankPool) -> None:
    ranks = 2
    whole, adam = (pool.run(ranks, train, config, None, FREEZE) for config in (config_of(0), ds_config(0)))
    assert [rank["losses"] for rank in whole] == [rank["losses"] for rank in adam]
    assert all(torch.equal(value, adam[0]["params"][name]) for name, value in whole[0]["params"].items())
    for changes in ({}, {"gradient_accumulation_steps": 2}, {"gradient_clipping": 0.05}):
        zero, one = (pool.run(ranks, train, config_of(stage, **changes), None, STEPS) for stage in (0, 1))
        assert [rank["losses"] for rank in zero] == [rank["losses"] for rank in one], changes
        assert all(torch.equal(value, zero[0]["params"][name]) for name, value in one[0]["params"].items()), changes
        assert zero[0]["norm"] == one[1]["norm"]
    zero, one = (pool.run(ranks, train, zero_one_config(stage), None, STEPS) for stage in (0, 1))
    assert [rank["losses"] for rank in zero] == [rank["losses"] for rank in one]


def test_one_rank_has_nothing_to_compress(pool: RankPool) -> None:
    (mine,), (adam,) = (pool.run(1, train, config, None, STEPS) for config in (config_of(1), ds_config(1)))
    assert mine["losses"] == adam["losses"]
    assert not [row for row in mine["rows"] if row["buffer"] in ("optim.error_feedback", "optim.server_error")]


# ---------------------------------------------------------------------- traffic


class Wide(nn.Module):
    def __init__(self, width: int = 384, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return x.float().square().mean()


def sent_by_step(group: dist.ProcessGroup, config: dict[str, Any], steps: int) -> list[int]:
    torch.manual_seed(0)
    engine = start(group, config, Wide())
    counted = []
    for _ in range(steps):
        before = engine.comm.sent_bytes
        engine.backward(engine(torch.randn(2, 384, dtype=torch.bfloat16)))
        engine.step()
        counted.append(engine.comm.sent_bytes - before)
    return counted


def test_bytes_on_the_wire(pool: RankPool) -> None:
    """Of a 16-bit all-reduce a sixteenth is sent after the freeze, and 4.9 times less over a run with 15 % warm-up."""
    freeze, steps = 3, 20
    for sent in pool.run(4, sent_by_step, config_of(0, "bf16", freeze), steps):
        usual = sent[freeze - 1]
        assert set(sent[1:freeze]) == {usual}
        assert len(set(sent[freeze:])) == 1
        assert usual / sent[-1] == pytest.approx(16, rel=0.01)
        assert steps * usual / sum(sent) > 4.9


# ---------------------------------------------------------------------- learning


def learn(group: dist.ProcessGroup, config: dict[str, Any], steps: int) -> float:
    """Learns a Markov chain; returns the mean loss of unseen samples."""
    rank = dist.get_rank(group)
    chain = torch.randn(models.VOCAB, models.VOCAB, generator=torch.Generator().manual_seed(5)).mul_(1.5).softmax(1)

    def sample(seed: int, count: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        rows = [torch.randint(0, models.VOCAB, (count,), generator=draw)]
        for _ in range(models.LENGTH):
            rows.append(torch.multinomial(chain[rows[-1]], 1, generator=draw).squeeze(1))
        return torch.stack(rows, 1)

    engine = start(group, config, models.make(depth=2))
    for number in range(steps):
        engine.backward(engine(sample(10 * number + rank, 32)))
        engine.step()
    with torch.no_grad():
        return float(engine(sample(-1, 512)))


@pytest.mark.long
def test_learns_as_well_as_adam(pool: RankPool) -> None:
    steps = 240
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-2, "total_num_steps": steps}}
    adam = pool.run(2, learn, ds_config(0, scheduler=schedule), steps)[0]
    mine = pool.run(2, learn, config_of(0, freeze_step=60, scheduler=schedule), steps)[0]
    untrained = pool.run(2, learn, ds_config(0), 0)[0]
    fewer = zero_one_config(0, freeze_step=120, updates=16, scheduler=schedule)
    other = pool.run(2, learn, fewer, steps)[0]
    assert adam < 0.85 * untrained
    assert mine < 1.01 * adam
    assert other < 1.01 * adam


# ---------------------------------------------------------------------- faults and checkpoints


def skip_one(group: dist.ProcessGroup, stage: int) -> tuple[int, bool, bool]:
    engine = start(group, config_of(stage, "fp16"))
    run(engine, group, range(FREEZE + 2))
    before = states_of(engine)
    bad = math.inf if dist.get_rank(group) == 1 else 1.0
    run(engine, group, range(FREEZE + 2, FREEZE + 3), bad)
    after = states_of(engine)
    same = all(torch.equal(value, new[key]) for old, new in zip(before, after, strict=True) for key, value in old.items())
    run(engine, group, range(FREEZE + 3, FREEZE + 4))
    moved = not torch.equal(states_of(engine)[0]["master"], after[0]["master"])
    return engine.skipped_steps, same, moved


@pytest.mark.parametrize("stage", [0, 1])
def test_an_overflow_on_one_rank_changes_nothing_on_any(pool: RankPool, stage: int) -> None:
    assert pool.run(2, skip_one, stage) == [(1, True, True)] * 2


def resume(group: dist.ProcessGroup, folder: Path, stage: int, loading_stage: int) -> list[bool]:
    engine = start(group, config_of(stage))
    run(engine, group, range(FREEZE + 2))
    engine.save_checkpoint(folder, tag="middle")
    run(engine, group, range(FREEZE + 2, STEPS))
    other = start(group, config_of(loading_stage), models.make(seed=1))
    other.load_checkpoint(folder)
    run(other, group, range(FREEZE + 2, STEPS))
    wanted, found = engine.module_state_dict() or {}, other.module_state_dict() or {}  # the first rank's
    pairs = zip(states_of(engine), states_of(other), strict=True)
    return [torch.equal(a[key], b[key]) for a, b in pairs for key in ("momentum", "worker", "server")] + [
        torch.equal(value, found[name]) for name, value in wanted.items()
    ]


def resume_elsewhere(group: dist.ProcessGroup, folder: Path) -> list[bool]:
    engine = start(group, config_of(1))
    run(engine, group, range(FREEZE + 1))  # what it left out is not the checkpoint's
    engine.load_checkpoint(folder)
    return [not state[key].any() for state in states_of(engine) for key in ("worker", "server")]


def test_a_checkpoint_resumes_both_errors(pool: RankPool, tmp_path: Path) -> None:
    for stage, loading_stage in ((0, 1), (1, 1)):
        folder = tmp_path / str(stage)
        assert all(all(rank) for rank in pool.run(2, resume, folder, stage, loading_stage))
    assert all(all(rank) for rank in pool.run(3, resume_elsewhere, tmp_path / "0"))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimization": {"stage": 2}}, "from stage 2 on no rank keeps gradients of its own"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "cannot be offloaded"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 0}}}, "not a whole number of 1 or more"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_steps": 10}}}, "unknown key 'freeze_steps'"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"amsgrad": True}}}, "'amsgrad' is not supported"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        zeroplan_runtime.initialize(model=models.make(), config={**config_of(0), **changes}, device="cpu")


def test_refused_for_an_optimizer_that_is_handed_over() -> None:
    config = {key: value for key, value in config_of(2).items() if key != "optimizer"}
    with pytest.raises(BadInput, match="no rank keeps gradients of its own"):
        zeroplan_runtime.initialize(
            model=models.make(), config=config, optimizer=lambda params: ZeroOptimizer(params, "onebitadam", {}), device="cpu"
        )


def with_groups(group: dist.ProcessGroup) -> str:
    model = models.make()
    params = list(model.parameters())
    groups = [{"params": params[:4], "weight_decay": 0.0}, {"params": params[4:], "betas": (0.8, 0.999)}]
    engine, *_ = zeroplan_runtime.initialize(
        model=model, config=config_of(0), model_parameters=groups, group=group, device="cpu"
    )
    try:
        run(engine, group, range(1))
    except BadInput as fault:
        return str(fault)
    return ""


def test_groups_share_what_a_unit_is_exchanged_with(pool: RankPool) -> None:
    assert all("exchanged as one" in said for said in pool.run(2, with_groups))


# ---------------------------------------------------------------------- GPUs

TWO_GPUS = """
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True, warn_only=True)
found = []
for path, stage in (("", 0), ("torch", 0), ("", 1)):
    os.environ["ZEROPLAN_KERNELS"] = path
    optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-2, "weight_decay": 0.1, "freeze_step": 3}}
    config = ds_config(stage, "bf16", optimizer=optimizer)
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config)
    losses = []
    for number in range(8):
        losses.append(engine.backward(engine(models.batch(number, 0, dist.get_rank()).to(device))).item())
        engine.step()
    engine.finish_step()
    kept = [unit.exchanged for unit in engine.model_states.units if unit.exchanged is not None]
    errors = [one.clone() for unit in kept for one in (unit.momentum, unit.worker_error, unit.server_error)]
    assert all(one.any() for one in errors[:2]) and all(one.isfinite().all() for one in errors)
    found.append((losses, errors))
    engine.destroy()
for losses, errors in found[1:]:
    assert losses == found[0][0], (losses, found[0][0])
    assert all(torch.equal(a, b) for a, b in zip(errors, found[0][1], strict=True))
"""


@pytest.mark.gpu
def test_kernels_and_stages_agree_over_nccl(tmp_path: Path) -> None:
    """The kernels' bits are those of torch's operations, which the simulation above holds on CPUs; stage 1's are stage 0's."""
    run_on_gpus(TWO_GPUS, tmp_path, ranks=2, timeout=600)
