"""DeepSpeed's own unit tests on the included runtime: ``python -m benchmarks.deepspeed_tests PATH_TO_DEEPSPEED``.

The tests are read from a checkout of DeepSpeed, which need not be installed: ``deepspeed`` is
``zeroplan_runtime.compat.deepspeed``. They run on the CPU (gloo) with at most two ranks. One pytest process runs one file, and
its tests share their rank processes. Tests of bf16, which DeepSpeed skips without a GPU, run with ``--bf16``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

#: What every training program uses.
CORE = (
    "runtime/test_ds_initialize.py",
    "runtime/test_lr_schedulers.py",
    "runtime/test_data.py",
    "runtime/test_ds_config_dict.py",
    "runtime/test_multi_output_model.py",
    "runtime/test_no_sync_ctxt.py",
    "runtime/zero/test_zero_grad_clip.py",
    "runtime/half_precision/test_dynamic_loss_scale.py",
    "runtime/half_precision/test_fp16.py",
    "runtime/half_precision/test_zero_optim_overflow.py",
    "v1/half_precision/test_bf16.py",
    "v1/half_precision/test_gradient_clipping_default.py",
)

#: What some programs use, and much of DeepSpeed's inside.
MORE = (
    "runtime/zero/test_zero_config.py",
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_context_ancestry.py",
    "runtime/zero/test_zero_context_return.py",
    "runtime/zero/test_zero_nesting_init.py",
    "runtime/zero/test_zero_dynamic_class.py",
    "runtime/zero/test_zero_tiled.py",
    "runtime/zero/test_unwrap_model.py",
    "runtime/zero/test_zero_leaf_module.py",
    "runtime/zero/test_zero_tensor_fragment.py",
    "runtime/test_multiple_models.py",
    "runtime/test_autocast.py",
    "runtime/test_runtime_utils.py",
    "runtime/activation_checkpointing/test_activation_checkpointing.py",
    "runtime/activation_checkpointing/test_activation_checkpointing_non_reentrant.py",
    "checkpoint/test_zero_optimizer.py",
    "checkpoint/test_other_optimizer.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_tag_validation.py",
    "checkpoint/test_latest_checkpoint.py",
    "checkpoint/test_shared_weights.py",
    "v1/zero/test_zero.py",
    "v1/zero/test_zero_user_backward.py",
)


def main() -> None:
    """Runs the files named, or the core list, and writes a table and a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deepspeed", type=Path, help="a checkout of DeepSpeed, with tests/unit")
    parser.add_argument("--files", nargs="*", default=CORE, help="test files, relative to tests/unit; the core list by default")
    parser.add_argument("--more", dest="files", action="store_const", const=MORE, help="the second list of files")
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("--bf16", action="store_true", help="run the tests of bf16 that DeepSpeed skips without a GPU")
    parser.add_argument("--as-cpu", action="store_true", help="skip what DeepSpeed skips on a CPU without fp16")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for a file")
    parser.add_argument("-o", "--output", type=Path, help="a JSON file with every outcome")
    parser.add_argument("--commit", default="", help="the checkout's commit, for the JSON file")
    given = parser.parse_args()
    rows = [row for file in given.files for row in run(given.deepspeed / "tests", file, given)]
    if given.output:
        given.output.write_text(
            json.dumps({"commit": given.commit, "bf16": given.bf16, **summary(rows), "tests": rows}, indent=1)
        )
    for file, counts in summary(rows)["files"].items():
        print(f"{file:60} {counts}")
    print(summary(rows)["total"])


def run(folder: Path, file: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One file's outcomes; a file that does not end in time is one failed row more."""
    print(file, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = Path(scratch) / "outcomes"
        outcomes.touch()
        top = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([top, str(folder), os.environ.get("PYTHONPATH", "")]),
            "DEEPSPEED_TESTS_OUTCOMES": str(outcomes),
            "LOCAL_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "DS_UNITTEST_TIMEOUT": "60",
        }
        if given.bf16:
            environment["DEEPSPEED_TESTS_BF16"] = "1"
        if given.as_cpu:
            environment["DEEPSPEED_TESTS_AS_CPU"] = "1"
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.deepspeed_tests.plugin", "-q", "-p", "no:cacheprovider"]
        command += ["--basetemp", str(Path(scratch) / "tmp"), f"unit/{file}"] + (["-k", given.k] if given.k else [])
        late = ""
        try:
            done = subprocess.run(command, cwd=folder, env=environment, timeout=given.timeout, capture_output=True, text=True)
            if done.returncode not in (0, 1, 5):
                late = f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-400:]}"
        except subprocess.TimeoutExpired:
            late = f"did not end within {given.timeout} s"
        rows = [{**json.loads(line), "file": file} for line in outcomes.read_text().splitlines()]
    for row in rows:
        if row["outcome"] == "failed":
            print("   ", row["test"].partition("::")[2], "|", row["says"], flush=True)
    return [*rows, {"test": file, "file": file, "outcome": "failed", "says": late, "seconds": 0}] if late else rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of outcomes, by file and in all."""
    files: dict[str, Counter[str]] = {}
    for row in rows:
        files.setdefault(row["file"], Counter())[row["outcome"]] += 1
    total = sum(files.values(), Counter())
    return {"total": dict(total), "files": {name: dict(counts) for name, counts in files.items()}}


if __name__ == "__main__":
    main()
