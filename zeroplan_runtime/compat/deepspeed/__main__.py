"""``python -m zeroplan_runtime.compat.deepspeed train.py ARGS``: its ``import deepspeed`` gives this package."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from zeroplan_runtime.compat.deepspeed.install import install


def main() -> None:
    """Runs the program named by the first argument, with the others."""
    if len(sys.argv) < 2:
        raise SystemExit("give a program: python -m zeroplan_runtime.compat.deepspeed train.py ARGS")
    install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
