"""DeepSpeed's MoE layers: what a rank allocates against DeepSpeed itself, the experts' partitions by hand, and refusals."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import zeroplan
from tests.engines.deepspeed.scripts import rows_of
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.moe import LARGEST_GROUP, expert_groups
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.deepspeed.schedule import distinct_ranks
from zeroplan.tapes import can_trace

pytestmark = [pytest.mark.torch, pytest.mark.skipif(not find_spec("deepspeed") or not can_trace(), reason="needs DeepSpeed")]

FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


def real_case(name: str, stage: int, dtype: str, *, window: int = 1, rank: int = 0, **other: Any) -> dict[str, Any]:
    """A case of run_moe_layers.py on one of four ranks."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": window,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 700_000, **other.pop("zero", {})},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    layers = {"num_experts": 4, "ep_size": 2, **other.pop("layers", {})}
    return {"id": name, "dtype": dtype, "ranks": 4, "rank": rank, "layers": layers, "config": config | other, "least": 90_000}


REAL = [
    real_case("stage 2", 2, "bf16"),
    real_case("stage 2, last rank", 2, "bf16", rank=3),
    real_case("stage 2, window", 2, "bf16", window=2, rank=1),
    real_case("stage 2, fp32", 2, "fp32"),
    real_case("stage 2, fp32 sums", 2, "bf16", rank=1, **FP32),
    real_case("stage 2, fp32 communication", 2, "bf16", communication_data_type="fp32"),
    real_case("stage 2, each rank has all experts", 2, "bf16", layers={"ep_size": 1, "k": 2}),
    real_case("stage 2, each rank has one expert", 2, "bf16", layers={"ep_size": 4}),
    real_case("stage 2, residual", 2, "bf16", layers={"use_residual": True}),
    real_case("stage 2, reduced to owners", 2, "bf16", zero={"use_multi_rank_bucket_allreduce": False}),
    real_case("stage 2, round robin", 2, "bf16", zero={"round_robin_gradients": True}),
    real_case("stage 2, aligned", 2, "bf16", zero={"parameter_alignment": True}),
    real_case("stage 1", 1, "bf16"),
    real_case("stage 1, fp32, overlapped", 1, "fp32", rank=2, zero={"overlap_comm": True}),
    real_case("stage 1, BF16_Optimizer", 1, "bf16", **FP32),
    real_case("stage 0", 0, "bf16"),
    real_case("stage 0, fp32", 0, "fp32"),
]


@pytest.mark.long
def test_a_rank_allocates_what_deepspeed_allocates(tmp_path: Path, warm_python: Path) -> None:
    """The same sizes in the same order, at initialisation and in each step."""
    rows = rows_of("run_moe_layers.py", REAL, tmp_path, warm_python)
    for row in rows:
        for ours, theirs in zip(row["ours"], row["theirs"], strict=True):
            assert ours == theirs, row["id"]


def test_experts_are_partitioned_among_the_ranks_that_hold_them() -> None:
    """By hand: 10 elements of all ranks, 6 + 8 of experts, of which eight ranks hold four different parts."""
    names = ("dense", "moe.deepspeed_moe.experts.deepspeed_experts.0.up", "moe.deepspeed_moe.experts.deepspeed_experts.0.down")
    parameters = Parameters(names, ((10,), (6,), (8,)), (True,) * 3, (True,) * 3, ("",) * 3, ((0,), (1,), (2,)))
    layout = ParallelLayout(8, ep=4, own_experts=True)
    ranks = [deepspeed_rank(parameters, Workload(), ZeroConfig.of(2), layout, rank=rank) for rank in range(8)]
    assert [rank.stepped_at_once for rank in ranks] == [[2, 8]] * 8  # 16 / 8 with padding, 16 / 2
    assert ranks[0].stepped == 10
    assert [[p for p, _ in rank.flat.owned(rank.rank)] for rank in ranks] == [
        *([[0, 1, 2]] * 4),  # ranks 0 to 3 are the first that hold their experts
        [0, 2],
        [2],
        [2],
        [2],
    ]
    assert distinct_ranks(ranks[0], most=4)[0] == 0
    assert expert_groups([1, 2], (10, LARGEST_GROUP, 8)) == [(1,), (2,)]


def _module(**layers: Any) -> Any:
    import torch
    from deepspeed.moe.layer import MoE

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = torch.nn.Linear(64, 64)
            expert = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
            self.moe = MoE(64, expert, **{"num_experts": 8, "ep_size": 4, "k": 2, **layers})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.before(x)
            made, balance, _ = self.moe(hidden)
            loss: torch.Tensor = (hidden + made).float().pow(2).mean() + balance
            return loss

    return Mixture()


def _plans(module: Any = None, **fields: Any) -> Any:
    import torch

    asked = {"gpus": 8, "gpu": "H100", "engine": "deepspeed", "inputs": torch.empty(64, 32, 64), **fields}
    return zeroplan.estimate(module or _module(), **asked)


def test_a_module_with_moe_layers_is_planned_from_its_trace() -> None:
    """Capacity decides what is dispatched: twice as much of it, twice the experts' activations, on a part of the whole."""
    (plan,) = _plans(stage=2)
    assert plan.fits is True
    (wider,) = _plans(_module(capacity_factor=4.0), stage=2)
    slots = 2 * 64 * 32 * 3  # of k = 2, for each of 3 more capacity factors
    assert wider.gpu.activations - plan.gpu.activations > slots * (64 + 2 * 256) * 2
    assert {one.stage for one in _plans()} == {0, 1, 2}


def test_experts_that_drop_no_tokens_are_not_said_to_fit() -> None:
    (plan,) = _plans(_module(drop_tokens=False), stage=1)
    assert plan.fits is None
    assert [one.key for one in plan.unmodelled] == ["drop_tokens"]


def test_a_search_over_such_a_module_is_refused() -> None:
    with pytest.raises(BadInput, match="step times of DeepSpeed's MoE layers"):
        zeroplan.recommend(_module(), gpus=8, gpu="H100")


@pytest.mark.parametrize(
    ("layers", "fields", "says"),
    [
        ({}, {"stage": 3}, "Native DeepSpeed MoE is not supported with ZeRO Stage 3"),
        ({}, {"engine": "fsdp2"}, "fsdp2 does not train DeepSpeed's MoE layers"),
        ({}, {"ep": 2}, "2 differs from the layers' ep_size 4"),
        ({}, {"tp": 2}, "not modelled beside MoE layers"),
        ({}, {"gpus": 6}, "ep 4 does not divide the 6 ranks"),
        ({}, {"stage": 2, "optimizer": "muon"}, "muon beside DeepSpeed's MoE layers"),
        ({}, {"ds_config": {"zero_optimization": {"stage": 2, "reduce_scatter": False}}}, "reduce scatter must be"),
        ({}, {"ds_config": {"zero_optimization": {"stage": 2, "contiguous_gradients": False}}}, "contiguous gradients must be"),
    ],
)
def test_what_deepspeed_refuses_or_is_not_modelled(layers: dict[str, Any], fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        _plans(_module(**layers), **fields)
