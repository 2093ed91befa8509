"""What planning may load: neither torch, transformers nor numpy; and no submodule hides a public function."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec

import pytest

import zeroplan

Run = Callable[..., subprocess.CompletedProcess[str]]
HEAVY = """
heavy = [m for m in ("torch", "transformers", "numpy", "pandas", "deepspeed") if m in sys.modules]
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "code",
    [
        "import zeroplan",
        "import zeroplan; zeroplan.estimate('meta-llama/Llama-3.2-1B', gpus=8, vram='24G')",
        "import zeroplan; zeroplan.estimate('meta-llama/Llama-3.1-405B', gpus=8, nodes=4, lora_rank=8)",
        "sys.argv = ['zeroplan', 'estimate', 'meta-llama/Llama-3.2-1B', '--json']\n"
        "from zeroplan.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit as stop:\n    assert not stop.code",
    ],
)
def test_planning_stays_light(code: str, fresh_python: Run) -> None:
    done = fresh_python(f"import sys\n{code}\n{HEAVY}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2", "ddp"])
def test_formula_depth_loads_no_schedule(engine: str, fresh_python: Run) -> None:
    code = (
        f"import sys, zeroplan\nzeroplan.estimate('meta-llama/Llama-3.2-1B', engine='{engine}', depth='formula')\n"
        "print([m for m in sys.modules if m.startswith(('zeroplan.simulate.', 'zeroplan.engines.player', 'zeroplan.tapes'))])"
    )
    done = fresh_python(code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_importing_the_package_loads_next_to_nothing(fresh_python: Run) -> None:
    done = fresh_python(
        "import sys, zeroplan\nprint(len([m for m in sys.modules if m.startswith('zeroplan')]), 'pydantic' in sys.modules)"
    )
    assert done.stdout.split() == ["1", "False"]


def test_no_submodule_shares_a_public_functions_name() -> None:
    for name in zeroplan.__all__:
        assert getattr(zeroplan, name) is not None
        assert find_spec(f"zeroplan.{name}") is None, name


def test_unknown_attributes_fail_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        zeroplan.nonsense  # noqa: B018
