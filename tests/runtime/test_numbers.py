"""What hostile scripts do with parameters, gradients and optimizers: the numbers equal plain torch's, or one line refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput

WIDTH = 16
CPU = {"offload_optimizer": {"device": "cpu"}}


class Net(nn.Module):
    """Three blocks between two layers of the root. `reads` lets the root use the last block's weight before that block."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.leave = nn.Linear(WIDTH, 1)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        if self.reads:
            x = nn.functional.linear(x, self.blocks[2][0].weight)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).square().mean()


def inner(model: nn.Module) -> nn.Module:
    return getattr(model, "module", model)


def l2(model: nn.Module) -> torch.Tensor:
    return sum((p.square().sum() for p in inner(model).parameters()), torch.zeros(()))


def penalty_before(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    penalty = l2(model)
    return model(x) + 0.1 * penalty


def penalty_after(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) + 0.1 * l2(model)


def one_weight(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    penalty = inner(model).blocks[1][0].weight.square().sum()
    return model(x) + 0.1 * penalty


def usual(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


USES: dict[str, tuple[dict[str, Any], Callable[[nn.Module, torch.Tensor], torch.Tensor]]] = {
    "penalty before": ({}, penalty_before),
    "penalty after": ({}, penalty_after),
    "one weight": ({}, one_weight),
    "root reads": ({"reads": True}, usual),
}


def data(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def sgd(stage: int, **changes: Any) -> dict[str, Any]:
    """Clipping that never clips, so that offloaded updates wait for the step."""
    return ds_config(stage, **{"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 1e9, **changes})


def against_plain(group: dist.ProcessGroup, use: str, config: dict[str, Any]) -> Any:
    """The largest difference from plain torch after three steps, of parameters and of an EMA of them; or the refusal.

    Between the steps the parameters are read: into an EMA, and as a norm.
    """
    options, call = USES[use]
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    accum = config.get("gradient_accumulation_steps", 1)
    torch.manual_seed(0)
    plain = Net(**options)
    model = copy.deepcopy(plain)
    shadows = [[p.detach().clone() for p in one.parameters()] for one in (plain, model)]
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
    worst = 0.0
    try:
        for number in range(3):
            for micro in range(accum):
                for each in range(ranks):
                    (call(plain, data(10 * number + micro, each)) / ranks / accum).backward()
                engine.backward(call(engine, data(10 * number + micro, rank)))
                engine.step()
            with torch.no_grad():
                for p in plain.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
                if config["zero_optimization"]["stage"] < 3:
                    for one, shadow in zip((plain, engine.module), shadows, strict=True):
                        for s, p in zip(shadow, one.parameters(), strict=True):
                            s.lerp_(p, 0.5)
                    worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*shadows, strict=True)))
        state = engine.module_state_dict()
    except BadInput as fault:
        return str(fault)
    finally:
        engine.destroy()
    if state is not None:
        worst = max(worst, *((state[name] - value).abs().max().item() for name, value in plain.state_dict().items()))
    return worst


CONFIGS = {
    "0": sgd(0),
    "1": sgd(1),
    "1, accumulated": sgd(1, gradient_accumulation_steps=2),
    "2": sgd(2),
    "2, accumulated": sgd(2, gradient_accumulation_steps=2),
    "1, on the host": sgd(1, zero_optimization=CPU),
    "2, on the host": sgd(2, zero_optimization=CPU),
    "2, on the host, accumulated": sgd(2, zero_optimization=CPU, gradient_accumulation_steps=2),
    "3": sgd(3),
}


def all_configs(group: dist.ProcessGroup, use: str) -> dict[str, Any]:
    return {name: against_plain(group, use, config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("use", USES)
def test_parameters_used_outside_their_forward(pool: RankPool, use: str) -> None:
    for found in pool.run(2, all_configs, use):
        refused = {name: said for name, said in found.items() if isinstance(said, str)}
        assert list(refused) == ["3"], found
        assert "is read while its unit" in refused["3"]
        assert "\n" not in refused["3"]
        assert all(found[name] < 1e-6 for name in CONFIGS if name not in refused), found


def said_by(call: Callable[[], Any]) -> str:
    """The one line that refuses `call`; empty if nothing does."""
    try:
        call()
    except BadInput as fault:
        assert "\n" not in str(fault)
        assert ";" in str(fault)  # a remedy follows
        return str(fault)
    return ""


def start(group: dist.ProcessGroup | None, config: dict[str, Any], model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return zeroplan_runtime.initialize(model=model or Net(), config=config, group=group, device="cpu")[0]


def take_steps(engine: Any, count: int, begin: int = 0) -> None:
    for number in range(begin, begin + count):
        engine.backward(engine(data(number, dist.get_rank(engine.comm.group) if engine.comm.group else 0)))
        engine.step()


def read_sharded(group: dist.ProcessGroup) -> None:
    """Stage 3, when the audit of the first micro batch is over: what is not gathered is refused, what is gathered is right."""
    engine = start(group, sgd(3))
    first = engine.module.blocks[0][0]
    early = first.weight.detach()
    take_steps(engine, 3)
    param = first.weight
    assert isinstance(param, nn.Parameter)
    assert (param.shape, param.numel(), param.dtype, param.grad) == ((WIDTH, WIDTH), WIDTH**2, torch.float32, None)
    assert param.to("cpu") is param
    reads: list[Callable[[], Any]] = [
        lambda: param.sum(),
        lambda: param.detach().clone(),
        lambda: param.data + 1,
        lambda: param.detach().numpy(),
        lambda: param[0].norm(),
        lambda: early.norm(),
        lambda: torch._foreach_norm(list(engine.module.parameters())),
        lambda: copy.deepcopy(param),
        lambda: nn.functional.linear(torch.ones(WIDTH), param),
        lambda: first(torch.ones(WIDTH)),
        lambda: nn.init.zeros_(param),
        lambda: print(param),
    ]
    for read in reads:
        assert "is read while its unit 'blocks.0' is not gathered" in said_by(read) or "blocks." in said_by(read)
    root = engine.module.enter.weight.detach().clone()
    with engine.gathered("blocks.0"):
        inside = param.detach().clone()
        assert torch.equal(early, param)
        assert "a graph would use 'blocks.0.0.weight' outside its unit's forward" in said_by(lambda: param.square().sum())
        with torch.no_grad():
            param.mul_(2.0)
    state = engine.module_state_dict()
    if state is not None:
        assert torch.equal(root, state["enter.weight"])
        assert torch.equal(2 * inside, state["blocks.0.0.weight"])
    take_steps(engine, 1, begin=3)  # as ever
    engine.destroy()


def write(group: dist.ProcessGroup, stage: int, zero: dict[str, Any]) -> Any:
    """Values written into 16-bit parameters, without a rate: the largest difference from them a step later."""
    config = sgd(stage, optimizer={"type": "SGD", "params": {"lr": 0.0}}, bf16={"enabled": True}, zero_optimization=zero)
    engine = start(group, config)
    take = [data(0, 0).bfloat16()]
    ways: list[Callable[[nn.Parameter], Any]] = [
        lambda p: p.mul_(3.0),
        lambda p: p.data.fill_(0.5),
        lambda p: p.detach().clamp_(-0.01, 0.01),
        lambda p: nn.init.ones_(p),
    ]
    worst = 0.0
    for way in ways:
        engine.backward(engine(*take))
        engine.step()
        with torch.no_grad():
            way(engine.module.blocks[1][0].weight)
            expected = engine.module.blocks[1][0].weight.clone()
            others = [p.clone() for p in engine.module.blocks[2].parameters()]
        engine.backward(engine(*take))
        engine.step()
        found = [p.clone() for p in (engine.module.blocks[1][0].weight, *engine.module.blocks[2].parameters())]
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(found, [expected, *others], strict=True)))
    engine.destroy()
    return worst


def reads_and_writes(group: dist.ProcessGroup) -> None:
    read_sharded(group)
    for stage, zero in ((0, {}), (1, {}), (2, {}), (1, CPU), (2, CPU)):
        assert write(group, stage, zero) == 0.0, (stage, zero)


def test_reads_and_writes_outside_the_engine(pool: RankPool) -> None:
    pool.run(2, reads_and_writes)


def test_gradients_are_not_to_be_read() -> None:
    model = Net()
    model.never = nn.Parameter(torch.zeros(3))
    engine = start(None, sgd(2, gradient_accumulation_steps=2), model)
    assert model.enter.weight.grad is None
    model.zero_grad()
    engine.backward(engine(data(0, 0)))
    calls: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: [p.grad for p in model.parameters()],
        lambda: [setattr(p, "grad", None) for p in model.parameters()],
        model.zero_grad,
    ]
    for call in calls:
        assert "set gradient_clipping" in said_by(call)
    engine.zero_grad()
    model.zero_grad()
    model.never.grad = torch.ones(3)
    for _ in range(2):
        assert engine.micro_steps == 0
        engine.backward(engine(data(0, 0)))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(data(0, 0)))
    assert "never.grad was set by hand" in said_by(engine.step)
