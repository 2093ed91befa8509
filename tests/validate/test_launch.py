"""Ranks that die, hang or run out of memory become one line that names them, and nothing is left running."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import zeroplan
from tests.patience import PATIENCE
from tests.validate.plain import Classifier, batch
from zeroplan.engines.registry import find_engine
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.validate.job import VerifyJob, job_of
from zeroplan.validate.launch import TorchrunLaunch
from zeroplan.validate.live import live_module
from zeroplan.validate.measured import measurement_of

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def endless(timeout: float) -> VerifyJob:
    """A job that ends only when it is ended."""
    module, live = Classifier(), live_module(Classifier(), batch())
    micro_batch, seq_len = live.shape()
    asked = Ask(model=module, engine="zeroplan", gpus=2, stage=3, micro_batch=micro_batch, seq_len=seq_len)
    return job_of(resolve(asked).cases[0], find_engine("zeroplan"), steps=10_000_000, timeout=timeout, live=live)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("blow", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_stops_is_named(blow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroplan.validate.launch._GRACE_SECONDS", 1.0)
    struck: list[dict[int, int]] = []

    def strike(job: int, doing: str) -> None:
        if doing.startswith("step 3 ") and not struck:
            monkeypatch.setattr("zeroplan.validate.launch._PATIENCE_SECONDS", 4.0)
            launch.timeout = 4.0  # until then a rank may be late
            struck.append(launch.pids())
            os.kill(struck[0][1], getattr(signal, blow))

    launch = TorchrunLaunch([endless(60.0)], 2, "cpu", strike, timeout=PATIENCE)
    try:
        launch.start()
        results = launch.finish()
    finally:
        launch.close()
    measured = measurement_of(results[0], device="cpu", ranks=2, failure=launch.failure)
    assert "rank 1" in measured.failure
    assert "\n" not in measured.failure
    assert len(struck[0]) == 2
    assert not [pid for pid in struck[0].values() if alive(pid)]


#: A rank may have 512 MiB more than it has at its start. The forward of the batch below takes more.
_LIMIT = """
import os
import re
import resource

if "LOCAL_RANK" in os.environ:
    taken = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1])
    resource.setrlimit(resource.RLIMIT_DATA, ((taken << 10) + (512 << 20),) * 2)
"""


def test_a_model_whose_states_fill_the_machine_is_never_built() -> None:
    """On a CPU the ranks' memory is the machine's own."""
    with pytest.raises(zeroplan.BadInput, match=r"2 ranks hold [\d.]+ TiB of the model's states, and there are"):
        zeroplan.verify("meta-llama/Llama-3.1-405B", stage=0, seq_len=8, engine="zeroplan")


@pytest.mark.usefixtures("warm_ranks")
def test_out_of_memory_says_in_which_phase_and_how_far_from_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(_LIMIT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    large = {name: values.repeat_interleave(3_000, 0) for name, values in batch().items()}
    drift = zeroplan.verify(Classifier(), inputs=large, stage=2, gpus=1, progress=lambda text: None)
    one = drift.comparisons[0]
    out = one.measurement.out_of_memory
    assert out is not None
    assert not drift.within
    assert out.phase == "forward"
    assert out.requested > 0
    assert out.allocated > 0
    assert one.verdict.startswith("out of memory in forward on rank 0")
    assert "the plan's peak is" in one.verdict
