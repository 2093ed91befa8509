"""Runs a script on GPUs by torchrun, one rank a GPU, over NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

_HEAD = """
import gc, os, sys
sys.path[:0] = [@root]
import torch, torch.distributed as dist
import zeroplan_runtime
from tests.runtime import models
from tests.runtime.train import ds_config
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
"""

_TAIL = """\
dist.destroy_process_group()
print("well", flush=True)
"""


def run_on_gpus(body: str, folder: Path, *, ranks: int, timeout: float) -> None:
    """Run `body` on each of `ranks` ranks; it finds ``device``, the process group, ``models`` and ``ds_config`` ready.

    The test is skipped where there are fewer GPUs.

    Args:
        body: lines of Python without indentation, which begin with a newline.
        folder: of the script.
        ranks: GPUs.
        timeout: seconds.
    """
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    script = folder / "rank.py"
    script.write_text(_HEAD.replace("@root", repr(str(ROOT))) + body.removeprefix("\n") + _TAIL)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("well") == ranks
