"""The whole command on a CPU: the built-in set, its exit codes, its JSON, and inside a torchrun."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.core.test_expert_parallel import CONFIG as MIXTURE
from tests.patience import PATIENCE
from tests.validate.small import CONFIG
from tests.validate.test_compare import measured, planned, result
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import EXIT_BAD_INPUT, EXIT_OUT_OF_TOLERANCE, BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.plan import ModelInfo
from zeroplan.core.sizes import GIB
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.planner.describe import describe_workload
from zeroplan.report.drift import drift_text
from zeroplan.validate.api import verify
from zeroplan.validate.compare import compare
from zeroplan.validate.job import job_of
from zeroplan.validate.results import Drift

pytestmark = [pytest.mark.torch]

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_the_built_in_set_is_exact_at_every_stage(cli: Cli) -> None:
    code, out, err = cli("verify", "--steps", "2", "--json")
    assert code == 0, out + err
    assert "stage 3: owned buffers exact" in err
    drift = Drift.model_validate_json(out)
    assert drift.machine["ranks"] == 2
    assert [one.plan.stage for one in drift.comparisons] == [0, 1, 1, 2, 2, 3, 3, 3]
    for one in drift.comparisons:
        assert one.plan.depth == "simulated"
        exact = [row for row in one.rows if row.judged == "exact"]
        assert len(exact) >= 6
        assert all(row.planned == row.measured for row in exact)
        if one.plan.offload_optimizer != "none":
            continue  # host and device are one memory here
        # What torch allocates beside the runtime comes from the tape: forward and backward, tensor by tensor.
        peak = next(row for row in one.totals if row.name == "peak of tensors")
        assert peak.difference is not None
        assert abs(peak.difference) < 4096
    assert json.loads(out)["schema"] == 1
    text = drift_text(drift)
    assert "8 of 8 as planned: owned buffers equal" in text
    assert "unattributed" in text


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    "asked", [{"stage": 3}, pytest.param({"stage": 2, "tp": 2}, marks=pytest.mark.long)], ids=str
)  # ranks of tp have different experts
def test_ranks_that_share_experts_are_as_planned(asked: dict[str, int]) -> None:
    model = {**MIXTURE, "moe_intermediate_size": 64, "vocab_size": 4096}  # the peak is beside the logits, on a CPU, too
    drift = verify(model, ep=2, gpus=2, micro_batch=2, seq_len=64, steps=2, progress=lambda _: None, **asked)
    one = drift.comparisons[0]
    assert drift.within, one.verdict
    assert one.measurement.owned
    assert sum(row.judged == "exact" for row in one.rows) >= 6


def test_only_degrees_that_an_engine_is_run_with_are_taken() -> None:
    case = Case(load_model(MIXTURE), Workload(), Cluster(gpus=2), ZeroConfig.of(0), parallel=ParallelLayout(gpus=2, pp=2))
    with pytest.raises(BadInput, match="verify does not run ddp with pp"):
        job_of(case, find_engine("ddp"))


def test_outside_the_tolerance_exits_with_3(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroplan.validate import api

    plan = planned()
    off = compare(plan, measured(result(plan, total=5 * GIB)), 0.02)
    drift = Drift(
        schema=1,
        model=ModelInfo(name="small", params=1, trainable=1, source="config"),
        workload=describe_workload(plan.case.workload),
        machine={"device": "cuda", "name": "H100", "memory": None, "count": 1, "backend": "nccl", "ranks": 1},
        tolerance=0.02,
        within=False,
        comparisons=(off,),
    )
    monkeypatch.setattr(api, "verify", lambda *_, **__: drift)
    code, out, _ = cli("verify")
    assert code == EXIT_OUT_OF_TOLERANCE
    assert "OUTSIDE: total is off by +25.0%" in out
    assert "1 of 1 outside the tolerance: stage 3." in out


@pytest.mark.slow
def test_inside_a_torchrun_every_rank_takes_part_and_the_first_prints(tmp_path: Path, warm_python: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    start = [warm_python.with_name("torchrun"), "--standalone", "--nproc-per-node=2", "-m", "zeroplan", "verify"]
    words = [str(config), "--stage", "3", "--seq-len", "64", "--json"]
    done = subprocess.run([*start, *words], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    drift = Drift.model_validate_json(done.stdout[done.stdout.index("{") :])
    assert drift.machine["ranks"] == 2
    assert drift.within
    one = drift.comparisons[0]
    assert one.measurement.owned
    # The head is tied to the embedding here: its gradient is written in place, the embedding's added to it.
    peak = next(row for row in one.totals if row.name == "peak of tensors")
    assert peak.difference is not None
    assert abs(peak.difference) < 4096


def test_a_file_with_comments_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    """A live module without a batch is refused behind the file."""
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true},  // as DeepSpeed takes it\n "train_micro_batch_size_per_gpu": 1,}')
    with pytest.raises(BadInput, match="has no config to build it from"):
        verify(torch.nn.Linear(2, 2), gpus=1, ds_config=str(file))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--tolerance", "2"), "is no fraction"),
        (("--steps", "1"), "is too few"),
        (("--gpus", "0"), "cannot be had here"),
        (("--stage", "3", "--offload-optimizer", "none", "--offload-param", "cpu"), "only where their whole optimizer does"),
        (("--optimizer", "muon"), "has no optimizer 'muon'"),
        (("--engine", "zeroplam"), "did you mean 'zeroplan'"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], what: str, cli: Cli) -> None:
    code, out, err = cli("verify", *words)
    assert code == EXIT_BAD_INPUT
    assert what in err
    assert err.count("\n") == 1
    assert not out
