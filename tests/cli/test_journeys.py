"""Two journeys, each step the command that the one before it printed: a config folder to a started run, a failed run's log to
a run that fits.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_next_commands import commands_in
from tests.patience import PATIENCE

Cli = Callable[..., tuple[int, str, str]]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
TRAIN = """#!/bin/bash
export WANDB_PROJECT=mine
deepspeed --num_gpus 4 train.py \\
    --model_name_or_path Qwen/Qwen2.5-0.5B \\
    --deepspeed zero2.json \\
    --per_device_train_batch_size 16 \\
    --gradient_accumulation_steps 2 \\
    --max_seq_length 2048 \\
    --bf16 True --output_dir out
"""
ZERO = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    **dict.fromkeys(("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size"), "auto"),
}
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.55 GiB. GPU 0 has a total capacity of 39.39 GiB of which "
    "1.20 GiB is free. Of the allocated memory 36.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but "
    "unallocated.\n"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a user stands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.long
def test_a_config_folder_to_a_started_run(cli: Cli, here: Path) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps(CONFIG))
    words = [
        "estimate",
        "./model",
        "--gpu",
        "2xT4",
        "--engine",
        "ddp",
        "--dtype",
        "fp32",
        "--seq-len",
        "64",
        "--micro-batch",
        "1",
    ]
    code, out, err = cli(*words)
    assert (code, err) == (0, "")
    assert out.startswith("Fits: ")
    (search,) = commands_in(out)
    code, out, err = cli(*search[1:])
    assert (code, err) == (0, "")
    assert out.startswith("Best: ")
    (writes,) = commands_in(out)
    assert writes[-2:] == ["--new-script", "train.py"]
    code, out, err = cli(*writes[1:])
    assert (code, err) == (0, "")
    start = next(line.strip() for line in out.splitlines() if "torchrun" in line)
    paths = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        shlex.split(start), env={**os.environ, **paths}, capture_output=True, text=True, timeout=5 * PATIENCE, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert re.search(r"step 1: loss \d", ended.stdout)


def test_a_failed_runs_log_to_a_run_that_fits(cli: Cli, here: Path) -> None:
    (here / "train.sh").write_text(TRAIN)
    (here / "zero2.json").write_text(json.dumps(ZERO, indent=4))
    (here / "train.py").write_text("from transformers import HfArgumentParser, TrainingArguments\n")
    (here / "oom.log").write_text(OOM)
    code, out, err = cli("doctor", "oom.log", "--from", "train.sh")
    assert (code, err) == (0, "")
    assert "does not fit" in out
    assert "Smallest change that fits: head and loss in tiles and " in " ".join(out.split())
    (search,) = commands_in(out)
    code, out, err = cli(*search[1:])
    assert (code, err) == (0, "")
    assert out.startswith("Best: ")
    assert "+    --per_device_train_batch_size " in out
    assert "gradient_checkpointing" not in out  # a default that stays is not written down
    (writes,) = commands_in(out)
    code, out, err = cli(*writes[1:])
    assert (code, err) == (0, "")
    assert (here / "train.sh").read_text() == TRAIN
    changed = (here / "run" / "train.sh").read_text()
    assert changed.count("\n") == TRAIN.count("\n")
    assert "export WANDB_PROJECT=mine" in changed
    limit = search[search.index("--vram") + 1]
    code, out, err = cli("check", "run/train.sh", "--vram", limit)
    assert (code, err) == (0, "")
    assert "\nFits: " in f"\n{out}"
