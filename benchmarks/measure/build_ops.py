"""Compiles DeepSpeed's FusedAdam and CPUAdam, once, before ranks that would each wait for it.

The CPU op is built for the processor at hand, so a cached build is tried in a process of its own
first: one made on another processor may die there by an illegal instruction.
"""

from __future__ import annotations

import subprocess
import sys
import time

_LOAD = "from deepspeed.ops.op_builder import {0}Builder as B; B().load()"
_CPU_STEP = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
p = torch.nn.Parameter(torch.ones(4096)); p.grad = torch.ones(4096)
DeepSpeedCPUAdam([p]).step()
assert p.abs().max() < 1
"""


def main() -> int:
    """Build both at once; 0 when both load and the CPU op takes a step."""
    begin = time.monotonic()
    names = ("FusedAdam", "CPUAdam", *sys.argv[1:])  # such as FusedLion
    builds = [subprocess.Popen([sys.executable, "-c", _LOAD.format(name)]) for name in names]
    codes = [build.wait() for build in builds]
    codes.append(subprocess.run([sys.executable, "-c", _CPU_STEP], check=False).returncode)
    print("ops: exit codes", codes, f"{time.monotonic() - begin:.0f}s", flush=True)
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    raise SystemExit(main())
