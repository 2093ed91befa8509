"""Calibration between nodes, on gloo ranks that stand for nodes of one GPU each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.runtime.forked_jobs import free_port
from zeroplan.core.rates import read_profile
from zeroplan.search.calibrate_network import spans_nodes

_RANK = """
import json, sys
from zeroplan.search.calibrate_network import measure_network
rank, found = measure_network(large=1 << 22, small=1 << 12)
print(json.dumps([rank, found]))
"""


def test_only_ranks_of_several_nodes_measure_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not spans_nodes()
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert not spans_nodes()
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert spans_nodes()


@pytest.mark.long
@pytest.mark.torch
def test_two_ranks_agree_on_what_they_measured(tmp_path: Path) -> None:
    port = str(free_port())
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", _RANK], env={**os.environ, **place, **where}, stdout=subprocess.PIPE, text=True
            )
        )
    said = [json.loads(one.communicate(timeout=PATIENCE)[0].splitlines()[-1]) for one in ranks]
    assert [rank for rank, _ in said] == [0, 1]
    assert said[0][1] == said[1][1]
    found = said[0][1]
    assert found.keys() == {"ring_gbs", "adapter_gbs", "network_us"}
    assert found["ring_gbs"] > 0
    assert found["adapter_gbs"] > 0
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"schema": 1, "gpu": "H100", "rates": found}))
    assert read_profile(profile)["rates"] == found
