"""A rank that dies or hangs ends the job, and the message names it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.forked_jobs import Ended, Job, run_job
from tests.runtime.train import ds_config

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
SAVE = 'engine.save_checkpoint("checkpoints")'
LOAD = 'engine.load_checkpoint("checkpoints")'
HANG = "time.sleep(1000)"
#: Where the optimizer is offloaded a read gathers what the step has updated, for which it needs every rank.
READ = "engine.module.embed.weight.sum() if engine.global_rank == 0 else torch.distributed.barrier()"
JOBS = {
    "dies": Job(KILL, 6),
    "hangs": Job(HANG, 4),
    "first dies in a save": Job(f"torch.save = lambda *_: {KILL}", 6, victim=0, act=SAVE),
    "second dies in a save": Job(f"torch.save = lambda *_: {KILL}", 6, act=SAVE),
    "hangs in a save": Job(f"torch.save = lambda *_, **__: {HANG}", 4, act=SAVE),
    "hangs in a load": Job(f"torch.load = lambda *_, **__: {HANG}", 4, act=LOAD),
    "is stopped": Job(STOP, 4),
    "first is stopped": Job(STOP, 4, victim=0),
    "is stopped in a save": Job(f"torch.save = lambda *_, **__: {STOP}", 4, act=SAVE),
    "dies in a load": Job(f"torch.load = lambda *_, **__: {KILL}", 6, act=LOAD),
    "dies in an offloaded update": Job(KILL, 6, zero={"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    "dies on tp": Job(KILL, 6, ranks=2, tp=True),
    "reads": Job("pass", 4, act=READ, zero={"stage": 1, "offload_optimizer": {"device": "cpu"}}),
}

#: The same over NCCL, two ranks; also with the first rank, which holds the rendezvous store, as the victim.
GPU_JOBS = {
    name: replace(job, ranks=2, device="cuda")
    for name, job in {
        **{name: JOBS[name] for name in ("dies", "hangs", "second dies in a save", "is stopped", "is stopped in a save")},
        "first dies": replace(JOBS["dies"], victim=0),
        **{name: JOBS[name] for name in ("first dies in a save", "dies in a load", "dies in an offloaded update")},
    }.items()
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, warm_python: Path) -> Iterator[dict[str, Future[Ended]]]:
    """All jobs but the first, three at a time: they wait most of their time."""
    rest = {name: job for name, job in JOBS.items() if name != "dies"}
    with ThreadPoolExecutor(3) as threads:
        yield {name: threads.submit(run_job, warm_python, tmp_path_factory.mktemp("job"), job) for name, job in rest.items()}


def test_a_rank_that_dies_is_named(warm_python: Path, tmp_path: Path) -> None:
    job = run_job(warm_python, tmp_path / "job", JOBS["dies"])
    assert job.code != 0
    for rank in (0, 2):
        assert re.search(r"rank 1 is dead: its process \d+ was killed or crashed \(last seen in", job.logs[rank])
        assert not re.search(rf"rank {2 - rank} is dead", job.logs[rank])


@pytest.mark.long
@pytest.mark.parametrize("name", ["is stopped", "first is stopped", "is stopped in a save", "dies in a load"])
def test_a_rank_that_is_stopped_or_killed_elsewhere_is_named(ended: dict[str, Future[Ended]], name: str) -> None:
    job = ended[name].result()
    require_named(name, JOBS[name], job)


@pytest.mark.long
def test_a_rank_that_dies_under_an_offloaded_update_is_named(ended: dict[str, Future[Ended]]) -> None:
    name = "dies in an offloaded update"
    require_named(name, JOBS[name], ended[name].result())


@pytest.mark.long
def test_a_rank_that_shares_matrices_and_dies_is_named(ended: dict[str, Future[Ended]]) -> None:
    """In a collective of the model's, not of the engine's."""
    require_named("dies on tp", JOBS["dies on tp"], ended["dies on tp"].result())


def require_named(name: str, job: Job, found: Ended) -> None:
    """Checks that every other rank ended, with a line that names itself, the victim and the cause."""
    cause = "is stopped: its process" if "stopped" in name else "(is behind|is stuck)" if "hangs" in name else "is dead"
    assert found.code != 0, found.logs
    for rank in set(range(job.ranks)) - {job.victim}:
        assert re.search(rf"rank {rank} .*; .*rank {job.victim} {cause}", found.logs[rank]), (name, found.logs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_JOBS)
def test_over_nccl(name: str, tmp_path: Path) -> None:
    """Each survivor names the victim and the cause within 30 s, and the last good checkpoint loads.

    CUDA cannot be used in a fork of a process that has asked for devices, as the warm interpreter has.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    job = GPU_JOBS[name]
    found = run_job(Path(sys.executable), tmp_path / "job", job)
    require_named(name, job, found)
    assert found.took < 30, (name, found.took)
    if job.act:
        checkpoints = found.folder / "checkpoints"
        engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(1), device="cpu")
        assert engine.load_checkpoint(checkpoints)[0] == str(checkpoints / "global_step3")


@pytest.mark.long
def test_a_rank_that_hangs_is_named(ended: dict[str, Future[Ended]]) -> None:
    job = ended["hangs"].result()
    assert job.code == 75
    for rank in (0, 2):
        assert "rank 1 is behind, in the optimizer's step, step 5, outside the engine since" in job.logs[rank]
    assert "has waited 4 s in" in job.logs[0] + job.logs[2]


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_a_save_is_named_and_the_last_good_checkpoint_loads(
    ended: dict[str, Future[Ended]], victim: int
) -> None:
    job = ended[("first dies in a save", "second dies in a save")[victim]].result()
    assert job.code != 0
    for rank in {0, 1, 2} - {victim}:
        assert re.search(rf"rank {rank} .*; .*rank {victim} is dead", job.logs[rank]), job.logs
    checkpoints = job.folder / "checkpoints"
    assert sorted(os.listdir(checkpoints)) == [".global_step5.saving", "global_step3", "latest"]
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(1), device="cpu")
    assert engine.load_checkpoint(checkpoints)[0] == str(checkpoints / "global_step3")


@pytest.mark.long
def test_a_rank_that_hangs_in_a_save_or_a_load_is_named(ended: dict[str, Future[Ended]]) -> None:
    for name, where in (
        ("hangs in a save", "writing __1_0.distcp of .global_step5.saving, step 5"),
        ("hangs in a load", "loading global_step3, step 5"),
    ):
        job = ended[name].result()
        assert job.code != 0, job.logs
        for rank in (0, 2):
            assert re.search(rf"rank 1 is (behind,|stuck) in {re.escape(where)}", job.logs[rank]), job.logs


@pytest.mark.long
def test_a_read_that_waits_for_ranks_which_do_not_come_is_named(ended: dict[str, Future[Ended]]) -> None:
    job = ended["reads"].result()
    assert job.code != 0
    assert "rank 0 has waited 4 s in reading parameter 'embed.weight', step 5; " in job.logs[0]
