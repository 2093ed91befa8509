"""The pytest plugin: ``deepspeed`` is the runtime's package, ranks are forked, and outcomes go to a JSON-lines file."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
import torch.multiprocessing
import torch.nn.parallel

from benchmarks.deepspeed_tests.placeholders import install_with_placeholders
from zeroplan_runtime.compat.deepspeed.accelerator import Accelerator
from zeroplan_runtime.compat.deepspeed.ops import compatible_ops


def _false(_: object) -> bool:
    """Answer as DeepSpeed's accelerator does about fp16 on most CPUs."""
    return False


install_with_placeholders()
# Their pool, but always of forked processes: a spawned one imports torch and everything else anew, for each test.
torch.multiprocessing.Pool = multiprocessing.get_context("fork").Pool

if os.environ.get("DEEPSPEED_TESTS_AS_CPU"):
    Accelerator.is_fp16_supported = _false  # type: ignore
    compatible_ops["fused_lamb"] = False

_ddp: Any = torch.nn.parallel.DistributedDataParallel.__init__


def _without_device_ids(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
    """Lets the plain model that a test compares with be on a CPU, though the test numbers its devices."""
    _ddp(self, module, **options)


def _agreed(flag: bool, op: Any = all) -> bool:
    """What the tests' own helper says of all ranks' flags; it makes them on a numbered device, which a CPU has not."""
    flags = [flag] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(flags, flag)
    return bool(op(flags))


torch.nn.parallel.DistributedDataParallel.__init__ = _without_device_ids  # type: ignore

_OUTCOMES = Path(os.environ["DEEPSPEED_TESTS_OUTCOMES"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Tests share their rank processes, as some of DeepSpeed's do anyway.

    With ``DEEPSPEED_TESTS_BF16`` tests of bf16 run too: DeepSpeed's check wants a GPU for them, the runtime does not.
    """
    if "unit.common" in sys.modules:
        vars(sys.modules["unit.common"])["reduce_boolean_flags"] = _agreed
    for item in items:
        if getattr(item.cls, "is_dist_test", False) and not item.cls.non_daemonic_procs:
            item.cls.reuse_dist_env = True
    if os.environ.get("DEEPSPEED_TESTS_BF16"):
        for item in items:
            if hasattr(item.module, "bf16_required_version_check"):
                item.module.bf16_required_version_check = lambda *_: True


def pytest_runtest_logreport(report: Any) -> None:
    """Writes one test's outcome, with the last line of its error."""
    if report.when != "call" and report.outcome == "passed":
        return
    if report.outcome == "skipped":
        says = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    else:
        says = _last_error(str(report.longrepr)) if report.longrepr else ""
    row = {"test": report.nodeid, "outcome": report.outcome, "says": says, "seconds": round(report.duration, 2)}
    with _OUTCOMES.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def pytest_collectreport(report: Any) -> None:
    """Writes a file that cannot be collected, as one failed test, or one that skips all of its tests."""
    if report.failed or (report.skipped and report.nodeid.endswith(".py")):
        row = {"test": report.nodeid, "outcome": report.outcome, "says": str(report.longrepr)[-300:], "seconds": 0}
        with _OUTCOMES.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def _last_error(text: str) -> str:
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E  ")]
    return (lines[0] if lines else text.strip().splitlines()[-1])[:300]
