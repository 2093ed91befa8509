"""Makes logs of runs that fail on purpose: ``python -m benchmarks.logs.make OUT [--only NAME]``.

Each case runs in a fresh process under the launcher that people use, on a GPU whose memory is capped or on the CPU; what it
prints goes to ``OUT/NAME.log``. The cases of a GPU need one. ``tests/logs/real`` keeps what they printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Cases that need a GPU, and those that need none.
ON_GPU = (
    *("oom_load", "oom_forward", "oom_loss", "oom_backward", "oom_step", "oom_save", "oom_fragmented"),
    *("oom_driver", "oom_two_ranks", "oom_trainer", "fp16_overflow", "fine_trainer"),
)
ON_CPU = ("nan_trainer", "nan_plain", "killed_rank", "killed_plain", "stuck_gloo", "cpu_refused", "key_error", "fine_plain")
_RANKS = {"oom_two_ranks": 2, "killed_rank": 2, "stuck_gloo": 2}


def main() -> int:
    """Run the cases that this machine can run."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cases = [*ON_CPU, *(ON_GPU if torch.cuda.is_available() else ())]
    for case in [case for case in cases if arguments.only in case]:
        script = [str(HERE / "failing.py"), case]
        ranks = _RANKS.get(case, 1)
        words = [sys.executable, *script]
        if ranks > 1:
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *script]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            ["bash", "-c", '"$@"; code=$?; [ $code -gt 128 ] && echo "exit code: $code"; exit $code', "run", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=240,
            env=environment,
            check=False,
        )
        (arguments.out / f"{case}.log").write_text(_without_paths(done.stdout))
        print(case, "exit", done.returncode, flush=True)
    return 0


def _without_paths(text: str) -> str:
    """Return the text with this machine's folders cut down to what any machine has."""
    for folder in {str(HERE.parent.parent), str(Path.home()), os.getcwd()}:
        text = text.replace(folder, "/home/user")
    return text.replace(str(Path(sys.prefix)), "/venv")


if __name__ == "__main__":
    raise SystemExit(main())
