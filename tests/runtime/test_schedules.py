"""Every schedule has DeepSpeed's learning rates and betas at every step, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.optim.schedules import SCHEDULES, make_schedule

CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-1, "cycle_first_step_size": 6}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_min_lr": 0.001, "warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 5, "warmup_type": "square"}),
    ("WarmupLR", {"warmup_max_lr": [0.1, 0.3], "warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 6, "warmup_max_lr": 0.02}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 6, "warmup_max_lr": 0.02, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 5, "warmup_max_lr": None}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 6, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 9, "warmup_type": "linear"}),
    ("LRRangeTest", {}),
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 3e-4], "lr_range_test_step_size": 7, "lr_range_test_step_rate": 0.3}),
    ("LRRangeTest", {"lr_range_test_step_size": 7, "lr_range_test_staircase": True}),
    ("OneCycle", CYCLE),
    ("OneCycle", {**CYCLE, "decay_lr_rate": 0.1, "decay_step_size": 3, "decay_mom_rate": 0.02}),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 11, "cycle_first_stair_count": 3, "cycle_second_stair_count": 5}),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 0, "cycle_momentum": False}),
    ("OneCycle", {**CYCLE, "cycle_min_lr": [1e-3, 2e-3], "cycle_min_mom": [0.7, 0.75], "cycle_max_mom": [0.9, 0.95]}),
]


def two_groups(kind: type[torch.optim.Optimizer], rate: Any = 0.05) -> torch.optim.Optimizer:
    """An optimizer with two groups of different rates."""
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    return kind([{"params": [first], "lr": rate}, {"params": [second], "lr": 0.2}])  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_values_are_deepspeeds(name: str, params: dict[str, Any], kind: type[torch.optim.Optimizer]) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
    mine, oracle = two_groups(kind), two_groups(kind)
    schedule, expected = make_schedule(name, params, mine), getattr(theirs, name)(oracle, **params)
    for step in range(40):
        for group, like in zip(mine.param_groups, oracle.param_groups, strict=True):
            assert [group["lr"], group.get("betas")] == [like["lr"], like.get("betas")], step
        assert schedule.get_lr() == expected.get_lr()
        if step == 20:  # as a checkpoint does it
            schedule = make_schedule(name, params, two_groups(kind))
            schedule.optimizer = mine
            schedule.load_state_dict(expected.state_dict())
        schedule.step()
        expected.step()


def test_every_schedule_of_deepspeed_is_here() -> None:
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
    assert set(SCHEDULES) == set(theirs.VALID_LR_SCHEDULES)
    assert {name for name, _ in CASES} == set(SCHEDULES)


@pytest.mark.parametrize(("name", "params"), [case for case in CASES if "[" not in str(case[1])], ids=str)
def test_a_rate_in_a_tensor_stays_that_tensor(name: str, params: dict[str, Any]) -> None:
    rate = torch.tensor(0.05, dtype=torch.float64)
    with_tensor, plain = two_groups(torch.optim.SGD, rate), two_groups(torch.optim.SGD)
    schedules = [make_schedule(name, params, one) for one in (with_tensor, plain)]
    for _ in range(10):
        assert with_tensor.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(plain.param_groups[0]["lr"], rel=1e-6)
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("WarmUpLr", {}, "did you mean 'WarmupLR'"),
        ("WarmupLR", {"warmup_steps": 3}, "warmup_steps"),
        ("WarmupLR", {"warmup_num_steps": None}, "positive number of steps"),
        ("WarmupLR", {"warmup_max_lr": [0.1]}, "1 values for 2 parameter groups"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "positive number of steps"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "has no rise"),
        ("OneCycle", {**CYCLE, "cycle_max_mom": [0.9, 0.9, 0.9]}, "3 values for 2 parameter groups"),
    ],
)
def test_what_is_wrong_is_named(name: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        make_schedule(name, params, two_groups(torch.optim.AdamW))
