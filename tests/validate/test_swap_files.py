"""The bytes of a run's swap files, against its plan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.validate.small import CONFIG, compared_here

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "folders",
    [
        pytest.param(("states", "params"), marks=pytest.mark.long),
        pytest.param(("states", "states"), marks=pytest.mark.long),
        ("states", "states/params"),
    ],
    ids=str,
)
def test_states_and_parameters_in_folders_of_their_own(folders: tuple[str, str], tmp_path: Path) -> None:
    """Each file is counted once, wherever the two folders are; locks are not counted."""
    for name in folders:
        (tmp_path / name).mkdir(exist_ok=True)
    states, params = ({"device": "nvme", "nvme_path": str(tmp_path / name)} for name in folders)
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": states, "offload_param": {**params, "max_in_cpu": 0}},
        "zeroplan": {"nvme_in_memory": True},
    }
    found = compared_here(config, model=CONFIG, seq_len=16)
    files = next(row for row in found.totals if row.name == "swap files")
    assert files.planned == files.measured == found.plan.nvme.per_node
    assert files.planned
    assert not found.mismatches
