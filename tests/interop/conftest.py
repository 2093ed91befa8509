from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
Ask = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
FIXTURES = HERE.parent / "fixtures" / "ds_configs"


@pytest.fixture(scope="session")
def oracle(
    tmp_path_factory: pytest.TempPathFactory, warm_python: Path
) -> Iterator[Callable[[list[dict[str, Any]]], list[dict[str, Any]]]]:
    """DeepSpeed's verdicts on a list of configs, from a process of its own that serves the session."""
    pytest.importorskip("deepspeed")
    said = tmp_path_factory.mktemp("oracle") / "stderr"
    with (
        said.open("w") as stderr,
        subprocess.Popen(
            [warm_python, str(HERE / "deepspeed_oracle.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            bufsize=1,
        ) as process,
    ):

        def ask(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
            assert process.stdin is not None
            assert process.stdout is not None
            answers = []
            for config in configs:
                with contextlib.suppress(BrokenPipeError):  # it then has no answer either
                    process.stdin.write(json.dumps(config) + "\n")
                answer = process.stdout.readline()
                assert answer, said.read_text()[-2000:]
                answers.append(json.loads(answer))
            return answers

        yield ask
        process.kill()
