from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FIXTURES = HERE.parent / "fixtures" / "ds_configs"


@pytest.fixture(scope="session")
def oracle() -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """DeepSpeed's verdicts on a list of configs, from a process of its own."""
    pytest.importorskip("deepspeed")

    def ask(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, str(HERE / "deepspeed_oracle.py")],
            input="\n".join(json.dumps(config) for config in configs),
            capture_output=True,
            text=True,
            timeout=280,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return ask
