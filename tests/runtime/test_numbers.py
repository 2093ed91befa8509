"""What hostile scripts do with parameters, gradients and optimizers: the numbers equal plain torch's, or one line refuses."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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


def one_cycle(group: dist.ProcessGroup, stage: int, kind: str, given: str) -> float:
    """OneCycleLR, which cycles momentum, too: the largest difference from plain torch after four steps."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    made = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "adam": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-3)}[kind]

    def cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)

    optimizer = made(plain.parameters())
    schedule = cycle(optimizer)
    mine = made(model.parameters())
    config = sgd(stage)
    engine, *_ = zeroplan_runtime.initialize(
        model=model,
        config=config,
        optimizer=mine,
        lr_scheduler=cycle(mine) if given == "made" else cycle,
        group=group,
        device="cpu",
    )
    for number in range(4):
        ranks = dist.get_world_size(group)
        for each in range(ranks):
            (plain(data(number, each)) / ranks).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        engine.backward(engine(data(number, dist.get_rank(group))))
        engine.step()
        engine.optimizer.zero_grad()
    state = engine.module_state_dict() or {}
    engine.destroy()
    return max(((state[name] - value).abs().max().item() for name, value in plain.state_dict().items() if state), default=0.0)


def momentum_comes_and_goes(group: dist.ProcessGroup) -> float:
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    config = sgd(2, optimizer={"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}, zero_optimization=CPU)
    engine = start(group, config, model)
    for number, momentum in enumerate((0.9, 0.0, 0.8, 0.9)):
        optimizer.param_groups[0]["momentum"] = engine.optimizer.param_groups[0]["momentum"] = momentum
        for each in range(2):
            (plain(data(number, each)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        take_steps(engine, 1, number)
    state = engine.module_state_dict() or {}
    engine.destroy()
    return max(((state[name] - value).abs().max().item() for name, value in plain.state_dict().items() if state), default=0.0)


def zeroed_between(group: dist.ProcessGroup, stage: int, zero: dict[str, Any]) -> bool:
    """`zero_grad()` of the optimizer between two backwards: only the second counts."""
    found = []
    for drops in (True, False):
        engine = start(group, sgd(stage, gradient_accumulation_steps=2, zero_optimization=zero))
        for number in range(2):
            if drops:
                engine.backward(engine(data(10, 0)))
                engine.optimizer.zero_grad()
            engine.backward(engine(data(number, 0)))
            engine.step()
            engine.backward(engine(data(number + 5, 0)))
            engine.step()
        found.append(engine.module_state_dict())
        engine.destroy()
    return found[0] is None or all(torch.equal(found[0][name], value) for name, value in found[1].items())


def optimizers(group: dist.ProcessGroup) -> None:
    for stage in (0, 2, 3):
        for kind, given in (("sgd", "made"), ("sgd", "function"), ("adam", "made")):
            assert one_cycle(group, stage, kind, given) < 1e-6, (stage, kind, given)
    assert momentum_comes_and_goes(group) < 1e-6
    for stage, zero in ((0, {}), (1, {}), (2, {}), (3, {}), (2, CPU)):
        assert zeroed_between(group, stage, zero), stage


def test_optimizers_and_schedules_as_they_are_changed(pool: RankPool) -> None:
    pool.run(2, optimizers)


def test_what_an_optimizer_cannot_take_over() -> None:
    model = Net()
    used = torch.optim.AdamW(model.parameters())
    model(data(0, 0)).backward()
    used.step()
    give = {"model": model, "config": sgd(0), "device": "cpu"}
    assert "has states of earlier steps" in said_by(lambda: zeroplan_runtime.initialize(**give, optimizer=used))
    engine = start(None, sgd(0))
    engine.backward(engine(data(0, 0)))
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    assert "momentum is 0.9 but was 0 when the engine was made" in said_by(engine.step)
    engine.optimizer.param_groups[0]["momentum"] = 0.0
    engine.step()
    dampened = start(None, sgd(0, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}}))
    dampened.optimizer.param_groups[0]["momentum"] = 0.0
    take_steps(dampened, 1)
    dampened.optimizer.param_groups[0]["momentum"] = 0.9
    dampened.backward(dampened(data(0, 0)))
    assert "no dampened sum can follow" in said_by(dampened.step)


CHANGES: dict[str, Callable[[dict[str, Any], int], None]] = {
    "NAdam": lambda group, i: group.update(betas=(0.6 + 0.08 * i, 0.9)),
    "ASGD": lambda group, i: group.update(lr=0.1 / i, lambd=0.3),
    "RMSprop": lambda group, i: group.update(momentum=0.5 + 0.1 * i),
    "Adamax": lambda group, i: group.update(betas=(0.9, 0.9 + 0.02 * i), maximize=i > 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_hyperparameters_that_change_in_every_step(name: str, tmp_path: Path) -> None:
    """Some follow from those of earlier steps; a checkpoint in the middle keeps these."""
    options = {"lr": 0.1, **({"momentum": 0.5} if name == "RMSprop" else {})}
    plain = Net()
    engine = start(None, sgd(0, optimizer={"type": name, "params": options}))
    plain.load_state_dict(engine.module_state_dict())
    optimizer = getattr(torch.optim, name)(plain.parameters(), **options)
    for i in range(1, 6):
        optimizer.zero_grad()
        plain(data(i, 0)).backward()
        engine.backward(engine(data(i, 0)))
        for one in (optimizer, engine.optimizer):
            CHANGES[name](one.param_groups[0], i)
        optimizer.step()
        engine.step()
        if i == 3:
            engine.save_checkpoint(tmp_path)
            engine.destroy()
            engine = start(None, sgd(0, optimizer={"type": name, "params": options}))
            engine.load_checkpoint(tmp_path)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(engine.module_state_dict()[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_options_that_add_states_come_with_the_optimizer() -> None:
    for name, option in (("AdamW", "amsgrad"), ("RMSprop", "centered")):
        engine = start(None, sgd(0, optimizer={"type": name, "params": {}}))
        engine.backward(engine(data(0, 0)))
        engine.optimizer.param_groups[0][option] = True
        assert f"{option} is True but was false when the engine was made" in said_by(engine.step)


def test_what_comes_too_late_for_updates_that_have_begun() -> None:
    """Where nothing clips or checks gradients, offloaded updates begin in the backward."""
    early = sgd(2, gradient_clipping=0.0, zero_optimization=CPU)
    engine = start(None, early)
    engine.backward(engine(data(0, 0)))
    engine.optimizer.param_groups[0]["lr"] = 0.5
    assert "a hyperparameter was changed between the backward and the step" in said_by(engine.step)
    engine.optimizer.param_groups[0]["lr"] = 0.1
    assert "is used after its update has begun" in said_by(lambda: engine.module.blocks[1][0].weight.sum())
    assert "updates with them have begun" in said_by(engine.optimizer.zero_grad)
    engine.step()
    assert engine.module.blocks[1][0].weight.sum().isfinite()
    engine.backward(engine(data(1, 0)))
    engine.destroy()


def test_a_loss_of_before_the_step_is_refused() -> None:
    for changes in ({}, {"zeroplan": {"direct_linear": False}}):
        engine = start(None, sgd(1, **changes))
        loss = engine(data(0, 0))
        take_steps(engine, 1)
        assert "has been changed since" in said_by(partial(engine.backward, loss))
        assert "(its graph was out of date); call engine.zero_grad()" in said_by(engine.step)
        engine.zero_grad()
        loss = engine(data(0, 0))
        engine.backward(loss, retain_graph=True)
        engine.step()
        assert "has been changed since" in said_by(partial(engine.backward, loss))
        engine.zero_grad()
        loss = engine(data(0, 0))
        with torch.no_grad():
            engine.module.blocks[1][0].weight.mul_(0.5)
        assert "has been changed since" in said_by(partial(engine.backward, loss))


class Buffers(Net):
    def __init__(self, alias: Callable[[Any], Any]) -> None:
        super().__init__()
        alias(self)


ALIASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a buffer": (lambda m: m.register_buffer("seen", m.enter.weight.detach()), "'enter.weight' and 'seen' share memory"),
    "a part": (lambda m: m.register_buffer("seen", m.enter.weight.detach()[3]), "'enter.weight' and 'seen' share memory"),
    "tied by data": (
        lambda m: setattr(m.blocks[0][0].weight, "data", m.enter.weight.data),
        "'enter.weight' and 'blocks.0.0.weight' share memory",
    ),
    "expanded": (lambda m: setattr(m.enter, "bias", nn.Parameter(torch.zeros(1).expand(WIDTH))), "elements of 'enter.bias'"),
}


@pytest.mark.parametrize("case", ALIASES)
def test_memory_that_would_part_is_refused(case: str) -> None:
    alias, said = ALIASES[case]
    assert said in said_by(lambda: start(None, sgd(2), Buffers(alias)))


def test_parts_of_one_tensor_are_no_aliases(caplog: pytest.LogCaptureFixture) -> None:
    def columns(model: Any) -> None:
        whole = torch.randn(WIDTH, 2 * WIDTH)
        model.enter.weight = nn.Parameter(whole[:, :WIDTH])
        model.blocks[0][0].weight = nn.Parameter(whole[:, WIDTH:])

    start(None, sgd(2), Buffers(columns)).destroy()
    assert not caplog.records
    model = Net()
    kept = model.leave.bias.data
    start(None, sgd(2), model)
    assert "'leave.bias' is shared with a tensor outside" in caplog.text
    assert kept.numel() == 1


def test_a_checkpoint_keeps_types_and_no_half_accumulations(tmp_path: Path) -> None:
    engine = start(None, sgd(2, gradient_accumulation_steps=2))
    engine.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(engine.optimizer, [1, 1, 3])
    engine.backward(engine(data(0, 0)))
    engine.step()
    assert "gradients that no step has used" in said_by(lambda: engine.save_checkpoint(tmp_path))
    engine.backward(engine(data(1, 0)))
    engine.step()
    engine.module.late = nn.Parameter(torch.ones(2), requires_grad=False)
    assert "'late' became a parameter after initialize" in said_by(lambda: engine.save_checkpoint(tmp_path))
    del engine.module.late
    state = {
        "tuple": (1, [2.5, None], "x"),
        3: {"inner": {(1, 2): {4, 5}}},
        "$tuple": {"$tuple": [1]},
        "bytes": b"\x00\xff",
        "inf": [float("inf"), float("-inf")],
        "rng": torch.get_rng_state(),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "numpy": np.random.RandomState(0).get_state(),
        "count": Counter("abca"),
    }
    engine.save_checkpoint(tmp_path, client_state=state)
    milestones = engine.lr_scheduler.milestones
    engine.lr_scheduler.milestones = Counter()
    _, found = engine.load_checkpoint(tmp_path)
    assert repr(found) == repr(state)
    assert all(type(found[key]) is type(value) for key, value in state.items())
    assert (type(engine.lr_scheduler.milestones), engine.lr_scheduler.milestones) == (Counter, milestones)
    assert "client_state['a'][1] is a tests.runtime.test_numbers.Net" in said_by(
        lambda: engine.save_checkpoint(tmp_path, "other", client_state={"a": [1, Net()]})
    )


def test_steps_skipped_in_a_row_are_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = start(None, sgd(2, bf16={"enabled": True}))
    good, bad = data(0, 0).bfloat16(), torch.full((4, WIDTH), float("nan"), dtype=torch.bfloat16)
    for batch in [bad, bad, good, *[bad] * 12]:
        engine.backward(engine(batch))
        engine.step()
    assert engine.skipped_steps == 14
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(" steps in a row")[0] for line in said] == ["3", "10"]
    assert all("NaN in root, blocks.0, blocks.1, blocks.2 on rank 0; look at" in line for line in said)
