"""On a GPU: a random program under each setting, whose recorded history the simulation must repeat to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.simulate.history import from_snapshot, read_history
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.allocator.run import run_allocator

pytestmark = pytest.mark.gpu


def have_gpu() -> bool:
    torch = pytest.importorskip("torch")
    return bool(torch.cuda.is_available())


@pytest.mark.parametrize(
    ("settings", "fraction", "streams"),
    [
        ("", 1.0, 1),
        ("", 1.0, 3),
        ("", 0.02, 1),
        ("expandable_segments:True", 1.0, 1),
        ("expandable_segments:True", 1.0, 2),
        ("expandable_segments:True", 0.02, 1),
        ("max_split_size_mb:32", 1.0, 1),
        ("max_split_size_mb:32", 0.02, 1),
        ("max_split_size_mb:32,max_non_split_rounding_mb:64", 0.02, 1),
        ("roundup_power2_divisions:4", 1.0, 1),
        ("roundup_power2_divisions:[1:2,4:8,16:4,>:1]", 1.0, 1),
        ("garbage_collection_threshold:0.5", 0.02, 1),
        ("garbage_collection_threshold:0.6,max_split_size_mb:32", 0.02, 1),
    ],
)
def test_a_random_program(tmp_path, settings, fraction, streams):
    if not have_gpu():
        pytest.skip("needs a CUDA device")
    out = tmp_path / "history.json"
    program = Path(__file__).with_name("random_program.py")
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": settings}
    command = [sys.executable, str(program), "7", str(fraction), str(streams), str(out)]
    subprocess.run(command, check=True, env=environment, timeout=PATIENCE)
    snapshot = json.loads(out.read_text())
    history = read_history(from_snapshot(snapshot), ran_out=fraction < 1)
    config = replace(AllocatorConfig.parse(settings), memory_fraction=fraction)
    recorder = history.recorder
    result = run_allocator(recorder.code, recorder.value, config, device_memory=snapshot["total"], addresses=history.addresses)
    assert len(recorder) > 1000
    assert [change.size for change in result.segments] == history.segments
