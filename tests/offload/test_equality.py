"""Training with the optimizer, and the parameters, on the host gives the bits of training without."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config, train_all

STEPS = 3
CPU = {"device": "cpu"}
#: Trainings on the device by ranks, model and config: several offloads are held against the same one.
_RESIDENT: dict[str, list[dict[str, Any]]] = {}


def pair(stage: int, dtype: str, *, param: bool = False, ratio: float = 1.0, **changes: Any) -> list[dict[str, Any]]:
    """The same training on the device and offloaded.

    Offloaded, every micro batch's gradients are reduced and then summed, which the device does from stage 2 on; and sums are
    of finished gradients, so that products that add to a sum as they go (linear layers') are left out of the comparison.
    """
    several = changes.get("gradient_accumulation_steps", 1) > 1
    if several:
        changes["zeroplan"] = {"direct_linear": False}
    resident = ds_config(max(stage, 2) if several else stage, dtype, **changes)
    zero = {"stage": stage, "offload_optimizer": {**CPU, "ratio": ratio}, **({"offload_param": CPU} if param else {})}
    return [resident, {**resident, "zero_optimization": zero}]


def assert_equal(pool: RankPool, ranks: int, cases: list[list[dict[str, Any]]], model: dict[str, Any] | None = None) -> Any:
    keys = [json.dumps([ranks, model or {}, case[0]], sort_keys=True) for case in cases]
    missing = {key: case[0] for key, case in zip(keys, cases, strict=True) if key not in _RESIDENT}
    configs = [*missing.values(), *(case[1] for case in cases)]
    trained = pool.run(ranks, train_all, [(config, model or {}) for config in configs], STEPS)
    for number, key in enumerate(missing):
        _RESIDENT[key] = [rank[number] for rank in trained]
    results = [
        [one for key, mine in zip(keys, found[len(missing) :], strict=True) for one in (_RESIDENT[key][rank], mine)]
        for rank, found in enumerate(trained)
    ]
    for rank in results:
        for number in range(len(cases)):
            resident, offloaded = rank[2 * number], rank[2 * number + 1]
            assert offloaded["losses"] == resident["losses"], cases[number][1]
            assert str(offloaded["norm"]) == str(resident["norm"]), cases[number][1]  # nan is nan
            assert (offloaded["skipped"], offloaded["scale"]) == (resident["skipped"], resident["scale"])
            if resident["params"] is not None:
                different = [n for n, p in resident["params"].items() if not torch.equal(p, offloaded["params"][n])]
                assert different == [], cases[number][1]
    return results


def ranks_and_more(*ranks: int) -> Any:
    """A test on two ranks; on other numbers of them, where only the cut of each tensor differs, it is a long one."""
    return pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.long) for n in ranks if n != 2)])


@ranks_and_more(1, 2, 3)
def test_every_stage_and_precision(pool: RankPool, ranks: int) -> None:
    dtypes = ("fp32", "bf16", "fp16") if ranks < 3 else ("bf16",)
    cases = [pair(stage, dtype) for stage in (1, 2, 3) for dtype in dtypes]
    cases += [pair(3, dtype, param=True) for dtype in dtypes[:2]]
    if ranks == 2:  # each stage in one precision; one rank has all
        cases = [*cases[:9:4], cases[-1]]
    assert_equal(pool, ranks, cases)


@pytest.mark.long
@ranks_and_more(1, 2)
def test_accumulation_clipping_and_wider_sums(pool: RankPool, ranks: int) -> None:
    several = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5}
    cases = [pair(stage, "bf16", **several) for stage in (1, 2, 3)]
    cases += [
        pair(3, "bf16", param=True, **several),
        pair(2, "bf16", **several, communication_data_type="fp32"),
        pair(2, "fp32", gradient_clipping=0.5, optimizer={"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}),
        pair(3, "bf16", optimizer={"type": "Lion", "params": {"lr": 1e-3}}),
    ]
    if ranks > 1:  # alone, a resident rank sums in fp32 from the first product on
        cases.append(pair(2, "bf16", **several, data_types={"grad_accum_dtype": "fp32"}))
    assert_equal(pool, ranks, cases)


@ranks_and_more(1, 2)
def test_a_part_of_the_optimizer(pool: RankPool, ranks: int) -> None:
    cases = [pair(stage, "bf16", ratio=0.5, gradient_clipping=0.5, gradient_accumulation_steps=2) for stage in (2, 3)]
    cases.append(pair(1, "bf16", ratio=0.5, gradient_clipping=0.5))
    results = assert_equal(pool, ranks, cases)
    for found in results[0][1::2]:
        places = {row["unit"]: row["place"] for row in found["rows"] if row["buffer"] == "param.master"}
        assert list(places.values()) == sorted(places.values(), key=["hbm", "dram"].index)  # the forward's first units stay
        assert set(places.values()) == {"hbm", "dram"}


@ranks_and_more(1, 2)
@pytest.mark.parametrize("model", [pytest.param({}, marks=pytest.mark.long), {"tied": True, "unused": True}], ids=str)
def test_without_clipping_or_checks_updates_begin_in_the_backward(pool: RankPool, ranks: int, model: dict[str, Any]) -> None:
    plain = {"bf16": {"enabled": True, "check_grad_overflow": False}, "gradient_clipping": 0.0}
    cases = [[{**config, **plain} for config in pair(stage, "bf16")] for stage in (1, 2, 3)]
    cases += [[{**config, **plain} for config in pair(3, "bf16", param=True, gradient_accumulation_steps=2)]]
    assert_equal(pool, ranks, cases, model)


def test_overflow_skips_the_same_steps(pool: RankPool) -> None:
    dynamic = {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}}
    cases = [pair(stage, "bf16", **dynamic) for stage in (1, 3)]
    cases = [[{k: v for k, v in config.items() if k != "bf16"} for config in case] for case in cases]
    for rank in assert_equal(pool, 2, cases):
        assert all(found["skipped"] > 0 for found in rank)


@ranks_and_more(1, 2)
@pytest.mark.parametrize("remat", ["plain", pytest.param("reentrant", marks=pytest.mark.long)])
def test_with_checkpointing(pool: RankPool, remat: str, ranks: int) -> None:
    cases = [pair(stage, "bf16") for stage in (1, 3)] + [pair(3, "bf16", param=True)]
    assert_equal(pool, ranks, cases, {"remat": remat})


def test_offloaded_training_learns(pool: RankPool) -> None:
    """The comparisons above would also hold for two runs that do nothing."""
    (result,) = pool.run(1, train_all, [(pair(3, "fp32", param=True)[1], {})], 1)[0]
    before = models.make().state_dict()
    assert all((result["params"][name] != before[name]).any() for name in before)


@pytest.mark.parametrize("remat", [pytest.param("plain", marks=pytest.mark.long), "reentrant"])
def test_checkpoints_on_the_host(pool: RankPool, remat: str) -> None:
    kept = {"activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True}}
    cases = [[ds_config(stage, "bf16"), {**ds_config(stage, "bf16"), **kept}] for stage in (2, 3)]
    cases.append([pair(3, "bf16", param=True)[0], {**pair(3, "bf16", param=True)[1], **kept}])
    for rank in assert_equal(pool, 2, cases, {"remat": remat}):
        for found in rank[1::2]:
            rows = [row for row in found["rows"] if row["buffer"] == "activation.checkpoint"]
            assert [row["place"] for row in rows] == ["pinned"] * 4  # of 5 blocks, the newest input stays
