"""``zeroplan doctor LOG``: the cause of every log, whatever stands around it."""

from __future__ import annotations

import pytest

from tests.logs.cases import CASES, LogCase
from tests.logs.public import PUBLIC
from tests.logs.real_runs import FOLDER, MISSED, REAL
from zeroplan.logs.diagnose import Cause, diagnose
from zeroplan.logs.patterns import sizes_in
from zeroplan.logs.reader import parse_log


@pytest.mark.parametrize("case", CASES + PUBLIC, ids=lambda case: case.name)
def test_the_cause_of_a_log(case: LogCase) -> None:
    found = diagnose(parse_log(case.text))
    assert found.cause is case.cause, found
    if case.phase is not None:
        assert found.phase == case.phase
    if case.rank is not None:
        assert found.rank == case.rank
    assert found.evidence or case.cause in (Cause.NOTHING, Cause.SLOWER)


def test_sizes_of_the_message() -> None:
    old = diagnose(parse_log(next(case.text for case in CASES if case.name == "oom 2.0 forward")))
    gib = 1 << 30
    assert old.sizes["tried"] == 20 << 20
    assert old.sizes["total"] == int(14.76 * gib)
    assert old.sizes["cached"] == pytest.approx(0.17 * gib, rel=0.01)
    new = diagnose(parse_log(next(case.text for case in CASES if case.name == "oom allowed fraction")))
    assert new.sizes["allowed"] == 8 * gib
    assert new.sizes["in_use"] == 8 * gib
    assert "cached" in new.sizes


def test_noise_around_a_log_changes_nothing() -> None:
    noise = "INFO 1/100 loading shard\n{'loss': 2.1, 'grad_norm': 1.0}\n" * 200
    for case in CASES + PUBLIC:
        if case.cause is not Cause.SLOWER and not case.name.startswith("loss 0"):  # which show in what comes last
            found = diagnose(parse_log(noise + case.text + "\n" + noise))
            assert found.cause is case.cause, case.name


def test_a_loss_of_0_is_no_fault_where_it_may_well_be_0() -> None:
    zeros = "{'loss': 0.0, 'grad_norm': 0.3, 'reward': 1.0}\n" * 30
    for text in (zeros, "{'loss': 0.0}\n" * 30, "{'loss': 1.2}\n" + "{'loss': 0.0}\n" * 30 + "{'loss': 1.1}\n"):
        assert diagnose(parse_log(text)).cause is Cause.NOTHING


def test_one_nan_counts_where_no_loss_follows() -> None:
    lost, found = "train_loss: nan", "train_loss: 2.1"
    for text, cause in ((f"{lost}\n{found}\n", Cause.NOTHING), (f"{found}\n{lost}\n", Cause.NOT_A_NUMBER)):
        assert diagnose(parse_log(text)).cause is cause
    assert diagnose(parse_log("{'loss': 2.1, 'grad_norm': nan}\n")).cause is Cause.NOTHING


def test_an_exception_of_any_name_ends_a_traceback_only() -> None:
    raised = "mine.core.BadInput: stage 4 is none\n"
    trace = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    run()\n'
    assert diagnose(parse_log(trace + raised)).cause is Cause.OTHER_ERROR
    assert diagnose(parse_log(raised)).cause is Cause.NOTHING


def test_a_scheduler_that_ends_the_others_is_not_the_cause() -> None:
    failed = "KeyError: 'input_ids'\nsrun: error: node1: task 3: Exited with exit code 1\n"
    stopped = "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2025-10-23T14:31:08 ***\n"
    assert diagnose(parse_log(failed + stopped)).cause is Cause.OTHER_ERROR
    assert diagnose(parse_log("srun: error: node1: task 3: Exited with exit code 1\n")).cause is Cause.LOST_RANK


def test_what_the_log_says_of_its_run() -> None:
    text = "  Instantaneous batch size per device = 4\n  Gradient Accumulation steps = 8\n"
    text += "  Number of trainable parameters = 1,235,814,400\n"
    text += "[INFO] [config.py:954:print]   zero_optimization_stage ...... 2\n[INFO] [config.py] bfloat16_enabled ... True\n"
    stated = parse_log(text).stated
    assert (stated.micro_batch, stated.grad_accum, stated.trainable) == (4, 8, 1_235_814_400)
    assert (stated.stage, stated.dtype) == (2, "bf16")


def test_long_lines_are_read_to_their_end_in_one_pass() -> None:
    """A pattern that goes back over a line would not end here: 3,000 characters that nearly match, 300 times."""
    text = ("x" * 3000 + " error nan out of memory killed -9 timeout ( \n") * 300
    assert parse_log(text).lines == 301


@pytest.mark.parametrize("name", REAL)
def test_the_cause_of_a_real_log(name: str) -> None:
    found = diagnose(parse_log((FOLDER / f"{name}.log").read_text()))
    assert (found.cause is REAL[name]) == (name not in MISSED), found


def test_most_logs_are_of_real_runs() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(REAL)
    assert len(REAL) > len(CASES) + len(PUBLIC)
    assert len(MISSED) <= 0.05 * len(REAL)


@pytest.mark.parametrize(
    "processes, own, others",
    [
        ("Process 12 has 22.44 GiB memory in use. ", 22.44, None),  # in a container: its own, by a number it does not know
        ("Process 12 has 1.00 GiB memory in use. Process 13 has 22.44 GiB memory in use. ", 22.44, 1.0),
        (
            "Process 12 has 1.00 GiB memory in use. This process has 22.44 GiB memory in use. ",
            22.44,
            1.0,
        ),
        ("Process 12 has 3.00 GiB memory in use. ", None, 3.0),
    ],
)
def test_a_process_that_holds_what_torch_does_is_this_one(processes: str, own: float | None, others: float | None) -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.65 GiB of"
        f" which 0.21 GiB is free. {processes}Of the allocated memory 20.89 GiB is allocated by PyTorch, and 1.02 GiB is"
        " reserved by PyTorch but unallocated."
    )
    found = sizes_in(text)
    for name, size in (("in_use", own), ("others", others)):
        assert found.get(name) == (None if size is None else int(size * 2**30))
