"""One script of each form trains on a CPU, started by the printed command and nothing else, in any POSIX shell and from folders
with spaces and quotes in their names.

What a CPU needs otherwise than a GPU is in the environment alone: DeepSpeed is told of the CPU and keeps from compiling its
collectives. The optimizer is one that DeepSpeed takes from torch, since its own would be compiled, too. accelerate, and the
Trainer through it, know no second rank without a GPU; so there is one.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import PATIENCE

pytestmark = pytest.mark.torch
Output = Callable[[str], tuple[int, str]]
ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
ASKED = ("--vram", "24G", "--global-batch", "8", "--micro-batch", "2", "--seq-len", "16", "--depth", "formula")
RUNS = {
    "explicit": ("--gpus", "2", "--stage", "2", "--optimizer", "sgd", "--offload-optimizer", "none"),
    "trainer": ("--stage", "3", "--dtype", "fp32", "--optimizer", "sgd", "--lora-rank", "4", "--gradient-checkpointing"),
    "accelerate": ("--stage", "3", "--optimizer", "sgd", "--gradient-checkpointing"),
    "lightning": ("--stage", "2", "--optimizer", "sgd"),
    "fsdp2": ("--engine", "fsdp2", "--gpus", "2", "--stage", "3", "--lora-rank", "4", "--gradient-checkpointing"),
    "accelerate-fsdp2": ("--engine", "fsdp2", "--form", "accelerate-fsdp2", "--stage", "3", "--dtype", "fp32"),
    "ddp": ("--engine", "ddp", "--gpus", "2", "--gradient-checkpointing"),
    "zeroplan": ("--engine", "zeroplan", "--gpus", "2", "--stage", "3", "--offload-param", "none", "--lora-rank", "4"),
}
#: Runs of DeepSpeed's engine, each rank of which is to keep from compiling.
OF_DEEPSPEED = frozenset({"explicit", "trainer", "accelerate", "lightning"})
_SITE = """
import os

if "LOCAL_RANK" in os.environ:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, warm_python: Path) -> Output:
    """The exit code and the output of a run's command."""
    for package in ("deepspeed", "accelerate", "lightning", "peft"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("trains")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(_SITE)
    (folder / "my model").mkdir()
    (folder / "my model" / "config.json").write_text(json.dumps(MODEL))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(warm_python.parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": path, "PATH": programs, "DS_ACCELERATOR": "cpu"}
    return lambda name: started(name, folder, environment)


def started(name: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """The exit code and the output of the command that ``recommend`` prints."""
    place = f"{name}'s run"  # as people name folders
    (folder / place).mkdir()
    form: tuple[str, ...] = () if "--engine" in RUNS[name] else ("--form", name)
    if name in ("explicit", "trainer"):  # torchrun finds a free port, DeepSpeed's launcher takes 29500
        form += ("--launcher", "torchrun")
    words = ["my model/config.json", *ASKED, *RUNS[name], *form, "--new-script", f"{place}/train it.py", "--json"]
    asked = subprocess.run(
        ["python", "-m", "zeroplan", "recommend", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if name in OF_DEEPSPEED:
        environment = {**environment, "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{environment['PYTHONPATH']}"}
    assert asked.returncode == 1, asked.stderr  # at formula depth nothing is known to fit; the files are written
    command = json.loads(asked.stdout)["files"]["start"]
    run = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.parametrize(
    "name",
    [
        "explicit",
        "zeroplan",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("fsdp2", "accelerate", "accelerate-fsdp2", "ddp")),
    ],
)
def test_a_script_takes_as_many_steps_as_the_batch_allows(output: Output, name: str) -> None:
    """Ten steps of the global batch are all the data there is, so another split of it would take more or fewer."""
    code, text = output(name)
    assert code == 0, text[-3000:]
    assert [f"step {i}: " in text for i in (1, 10, 11)] == [True, True, False], text[-3000:]


@pytest.mark.long
def test_the_trainer_takes_as_many_steps(output: Output) -> None:
    code, text = output("trainer")
    assert code == 0, text[-3000:]
    assert "'epoch': '1'" in text
    assert "train_loss" in text


@pytest.mark.long
def test_lightning_goes_as_far_as_it_does_without_a_gpu(output: Output) -> None:
    """Its DeepSpeedStrategy runs on CUDA alone, and the arguments ask for GPUs."""
    code, text = output("lightning")
    assert code != 0
    assert "No supported gpu backend found" in text, text[-3000:]
