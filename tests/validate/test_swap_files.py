"""The bytes of a run's swap files, against its plan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.validate.small import CONFIG
from zeroplan.engines.registry import find_engine
from zeroplan.planner.request import Request
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.validate.compare import compare
from zeroplan.validate.job import job_of
from zeroplan.validate.measured import measurement_of
from zeroplan.validate.planned import predict

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("folders", [("states", "params"), ("states", "states"), ("states", "states/params")], ids=str)
def test_states_and_parameters_in_folders_of_their_own(folders: tuple[str, str], tmp_path: Path) -> None:
    """Each file is counted once, wherever the two folders are; locks are not counted."""
    from zeroplan.validate.rank.probe import RankDevice
    from zeroplan.validate.rank.run import run_job

    for name in folders:
        (tmp_path / name).mkdir(exist_ok=True)
    states, params = ({"device": "nvme", "nvme_path": str(tmp_path / name)} for name in folders)
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": states, "offload_param": {**params, "max_in_cpu": 0}},
        "zeroplan": {"nvme_in_memory": True},
    }
    resolved = resolve(Request(model=CONFIG, engine="zeroplan", ds_config=config, seq_len=16))
    (case,) = resolved.cases
    planned = predict(resolved.engine, case, ExpandedTapes(resolved.engine))
    result = run_job(job_of(case, find_engine("zeroplan"), raw=config, steps=2), RankDevice.of("cpu", 0), lambda _: None)
    found = compare(planned, measurement_of([result], device="cpu", ranks=1), 0.02)
    files = next(row for row in found.totals if row.name == "swap files")
    assert files.planned == files.measured == planned.plan.nvme.per_node
    assert files.planned
    assert not found.mismatches
