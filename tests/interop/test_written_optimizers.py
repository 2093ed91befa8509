"""Every ds_config that zeroplan writes for an optimizer, a stage and an offload is one that DeepSpeed then runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zeroplan.core.optimizers import OPTIMIZERS
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig, stages_and_offloads
from zeroplan.ds_config.reader import inspect_ds_config
from zeroplan.engines.deepspeed.engine import DeepSpeed

Oracle = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]

OPTIONS = [(z.stage, z.offload_optimizer.device.value, z.offload_param.device.value) for z in stages_and_offloads()]
#: The optimizers that DeepSpeed combines with ZeRO. The program brings those without a type of DeepSpeed's.
NAMES = [row.name for row in OPTIMIZERS.values() if row.zero]
WRITTEN = [name for name in NAMES if OPTIMIZERS[name].written is not None]


def written(name: str, dtype: DType, ranks: int, nvme_path: str = "/local_nvme") -> Iterator[tuple[ZeroConfig, dict[str, Any]]]:
    """What zeroplan writes, at every stage and offload."""
    precision = Precision.FP32 if dtype is DType.FP32 else Precision.MIXED
    workload = Workload.of(dtype=dtype, precision=precision, optimizer=name)
    engine = DeepSpeed()
    for stage, optimizer, param in OPTIONS:
        path = {"nvme_path": nvme_path} if "nvme" in (optimizer, param) else {}
        zero = engine.for_optimizer(ZeroConfig.of(stage, optimizer, param, **path), name)
        config = engine.ds_config(zero, workload, ParallelLayout(ranks))
        assert config is not None
        yield zero, config


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", list(DType))
def test_a_written_config_is_not_refused_and_means_the_optimizer(name: str, dtype: DType) -> None:
    for zero, config in written(name, dtype, ranks=4):
        found = inspect_ds_config(config, world_size=4)
        assert not found.errors, (zero.stage, found.errors)
        assert found.zero == zero
        row = OPTIMIZERS[name].written
        if row is not None:
            assert found.workload(Workload()).numerics.optimizer == (row.becomes or name)


@pytest.mark.torch
@pytest.mark.long
def test_deepspeed_builds_its_engine_from_every_written_config(
    oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("nvme"))
    configs = [config for name in WRITTEN for _, config in written(name, DType.BF16, ranks=1, nvme_path=folder)]
    refused = [
        (config["optimizer"]["type"], config["zero_optimization"], answer["error"])
        for config, answer in zip(configs, oracle(configs), strict=True)
        if not answer["builds"]
    ]
    assert not refused
    assert len(configs) == len(WRITTEN) * len(OPTIONS)
