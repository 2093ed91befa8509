"""Every optimizer of ``torch.optim``, with each option that changes its step: equal to plain torch, or refused by a reason."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import OPTIMIZERS
from zeroplan_runtime.parameter_states import ParameterStates

STEPS = 5
#: Values unlike the defaults, of which a class gets those that its constructor takes.
USUAL: dict[str, Any] = {
    "lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1, "betas": (0.6, 0.9), "rho": 0.8, "lr_decay": 0.3,
    "initial_accumulator_value": 0.1, "momentum_decay": 0.4, "alpha": 0.7, "lambd": 0.2, "t0": 2.0, "etas": (0.4, 1.3),
    "step_sizes": (1e-5, 1e-2), "nesterov": False,
}  # fmt: skip
#: Options that add states or change the step, each tried alone and the first two of a class's together.
SWITCHES: dict[str, Any] = {
    "maximize": True, "amsgrad": True, "momentum": 0.8, "centered": True, "decoupled_weight_decay": True,
}  # fmt: skip
#: Where each is tried, in turn.
PLACES: tuple[dict[str, Any], ...] = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
)
#: Those that no part of the parameters can be stepped by.
REFUSED = {
    "Adafactor": "depends on others of the same tensor",
    "LBFGS": "history of past steps",
    "Muon": "depends on others of the same tensor",
    "SparseAdam": "sparse gradients",
}


def torchs() -> list[str]:
    kinds = {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    return sorted(n for n, k in kinds.items() if issubclass(k, torch.optim.Optimizer) and k is not torch.optim.Optimizer)


def options(name: str) -> list[dict[str, Any]]:
    takes = inspect.signature(getattr(torch.optim, name)).parameters
    usual = {key: value for key, value in USUAL.items() if key in takes}
    switches = [{key: value} for key, value in SWITCHES.items() if key in takes]
    both = [first | second for first, second in itertools.pairwise(switches)]
    more = [{"momentum": 0.8, "nesterov": True, "maximize": True}] if "nesterov" in takes else []
    return [usual | one for one in ({}, *switches, *both, *more)]


def make(name: str, chosen: dict[str, Any], model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer, two groups of it unlike each other, and a schedule that changes the rate in every step."""
    params = list(model.parameters())
    groups = [{"params": params[:9]}, {"params": params[9:], "lr": 1e-3}]
    optimizer = getattr(torch.optim, name)(groups, **chosen)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def train(group: dist.ProcessGroup, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each case the parameters, the optimizer's states, and by buffer the bytes that are there and that the plan counts."""
    found = []
    for name, chosen, place in cases:
        model = models.make(depth=2)
        optimizer, schedule = make(name, chosen, model)
        config = ds_config(place["stage"], zero_optimization=place)
        del config["optimizer"]
        engine, *_ = zeroplan_runtime.initialize(
            model=model, config=config, optimizer=optimizer, lr_scheduler=schedule, group=group, device="cpu"
        )
        for number in range(STEPS):
            engine.backward(engine(models.batch(number, 0, group.rank())))
            engine.step()
        counted: dict[str, int] = {}
        for row in runtime_buffers(engine.model_states.layout):
            counted[row.buffer.value] = counted.get(row.buffer.value, 0) + row.bytes
        made: dict[str, int] = {}
        for row in engine.arena.measurement():
            made[row["buffer"]] = made.get(row["buffer"], 0) + row["peak"]
        found.append(
            {
                "params": engine.module_state_dict(),
                "states": states_of(engine),
                "counted": counted,
                "made": {key: value for key, value in made.items() if key in counted},
            }
        )
        engine.destroy()
    return found


def states_of(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    states = ParameterStates(engine)
    keys = states.keys()
    return {n: {key: states.whole(p, key) for key in keys} for n, p in engine.module.named_parameters()}


def plain(name: str, chosen: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    model = models.make(depth=2)
    optimizer, schedule = make(name, chosen, model)
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (model(models.batch(number, 0, rank)) / 2).backward()
        optimizer.step()
        schedule.step()
    states = {
        n: {key: t for key, t in optimizer.state[p].items() if torch.is_tensor(t) and t.shape == p.shape and key != "step"}
        for n, p in model.named_parameters()
    }
    return model.state_dict(), states


@pytest.mark.long
def test_every_optimizer_of_torch(pool: RankPool) -> None:
    names = [name for name in torchs() if name not in REFUSED]
    assert set(REFUSED) < set(torchs())
    trained = [(name, chosen) for name in names for chosen in options(name)]
    cases = [(*one, PLACES[i % len(PLACES)]) for i, one in enumerate(trained)]
    found = pool.run(2, train, cases)[0]
    rows = set()
    for (name, chosen, place), mine in zip(cases, found, strict=True):
        params, states = plain(name, chosen)
        what = (name, chosen, place)
        for key, value in params.items():
            torch.testing.assert_close(mine["params"][key], value, rtol=1e-4, atol=2e-6, msg=lambda m, w=what: f"{w}: {m}")
        scalars = {"mu", "eta", "mu_product"}  # of one-element parameters, which have their shape
        for key, kept in states.items():
            wanted = {k: t for k, t in kept.items() if k not in scalars}
            assert set(mine["states"][key]) == set(wanted), what
            for state, value in wanted.items():
                torch.testing.assert_close(mine["states"][key][state], value, rtol=1e-3, atol=1e-5, msg=f"{what} {state}")
        assert mine["made"] == mine["counted"], what
        rows.add(frozenset(mine["states"]["head.weight"]))
    elementwise = {frozenset(s.state_key for s in row.states) for row in OPTIMIZERS.values() if row.torch and row.runtime}
    assert rows == elementwise  # every row of the table was trained


def test_the_rest_is_refused_with_the_reason() -> None:
    for name, why in REFUSED.items():
        model = torch.nn.Linear(4, 4)
        params = [model.weight] if name == "Muon" else list(model.parameters())
        optimizer = getattr(torch.optim, name)(params)
        try:
            zeroplan_runtime.initialize(model=model, config=ds_config(0), optimizer=optimizer, device="cpu")
        except BadInput as fault:
            assert why in str(fault)
            assert "\n" not in str(fault)
        else:
            raise AssertionError(name)
