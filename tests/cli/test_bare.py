"""Questions without a verb go to the verb that answers them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zeroplan.cli.bare import overview, question


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(
        "torchrun --nproc_per_node 2 run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --output_dir o\n"
    )
    (tmp_path / "ds_config.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    (tmp_path / "oom.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    return tmp_path


@pytest.mark.parametrize(
    "words, asks",
    [
        (["Llama-3.1-8B", "24G"], ["estimate", "Llama-3.1-8B", "--vram", "24G"]),
        (["meta-llama/Llama-3.1-8B", "8xH100"], ["estimate", "meta-llama/Llama-3.1-8B", "--gpu", "8xH100"]),
        (["gpt2", "--gpus", "2", "RTX4090"], ["estimate", "gpt2", "--gpus", "2", "--gpu", "RTX4090"]),
        (["gpt2", "--cpu-ram", "64G"], ["estimate", "gpt2", "--cpu-ram", "64G"]),
        (["train.sh", "H100"], ["estimate", "--from", "train.sh", "--gpu", "H100"]),
        (["ds_config.json"], ["check", "ds_config.json"]),
        (["oom.log", "gpt2"], ["doctor", "oom.log", "gpt2"]),
        (["estimat", "gpt2"], None),
        (["no-such-file.sh"], None),
    ],
)
def test_the_verb_follows_from_what_is_named(words: list[str], asks: list[str] | None, project: Path) -> None:
    assert question(words) == asks


def test_the_command_that_is_asked_is_said_on_stderr(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zeroplan", "gpt2", "24G", "--json"], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[0] == "zeroplan estimate gpt2 --vram 24G --json"
    assert json.loads(done.stdout)["model"]["name"] == "gpt2"


def test_a_folder_with_a_project_says_what_can_be_asked_of_it(project: Path) -> None:
    text = overview()
    for command in ("estimate --from train.sh", "check ds_config.json", "doctor oom.log"):
        assert f"  zeroplan {command}" in text


def test_an_empty_folder_has_nothing_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert overview() == ""
