"""What a file says in a way that its program takes otherwise, and what flags say in its place, is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]
ASKED = ("meta-llama/Llama-3.2-1B", "--vram", "80G", "--depth", "formula", "--stage", "2")


@pytest.mark.parametrize(
    ("key", "value"), [("per_device_train_batch_size", "4"), ("gradient_accumulation_steps", "2"), ("bf16", "false")]
)
def test_the_trainer_takes_no_text_for_a_number(cli: Cli, tmp_path: Path, key: str, value: str) -> None:
    """transformers 5.17: parse_json_file keeps "4", of which the DataLoader dies; "false" is true, as any text is."""
    path, engine = tmp_path / "args.json", ("--program", "hf-trainer", "--engine", "ddp")
    asked = (*ASKED[:-2], "--from", str(path), *engine)
    path.write_text(json.dumps({"output_dir": "out", "per_device_train_batch_size": 4, key: value}))
    code, out, err = cli("estimate", *asked)
    assert (code, out) == (2, "")
    assert f"{key}: '{value}' is a text, which the Trainer takes as it stands; write it without quotes" in err
    path.with_suffix(".sh").write_text(
        f"torchrun train.py --output_dir out --learning_rate 1e-5 --num_train_epochs 1 --{key} {value}\n"
    )
    assert cli("estimate", *(str(path.with_suffix(".sh")) if word == str(path) else word for word in asked))[0] == 0
    path.write_text(json.dumps({"output_dir": "out", "per_device_train_batch_size": 4, key: json.loads(value)}))
    assert cli("estimate", *asked)[0] == 0


@pytest.mark.parametrize("verb", ["estimate", "recommend"])
def test_flags_of_another_machine_are_told(cli: Cli, tmp_path: Path, verb: str) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 8\nnum_machines: 2\ndeepspeed_config: {zero_stage: 2}\n")
    words = (verb, *(ASKED if verb == "recommend" else ASKED[:-2]), "--from", str(path), "--json")
    assert "by the flags" not in cli(*words)[1]
    out = cli(*words, "--gpus", "2")[1]
    assert "2 GPUs a node by the flags, 4 by num_processes" in out
    assert json.loads(out)


@pytest.mark.parametrize("verb", ["estimate", "recommend", "check"])
def test_one_gpu_is_one_where_it_is_asked_for(cli: Cli, tmp_path: Path, verb: str) -> None:
    """Four would each hold a quarter: a plan of them for the one there is would be a false promise."""
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n")
    words = ("check", str(path), *ASKED[:-2]) if verb == "check" else (verb, *ASKED[:-2], "--from", str(path))
    engine = ("--engine", "fsdp2") if verb == "recommend" else ()
    why = () if verb == "check" else ("--why",)

    def gpus(*more: str) -> int:
        answer = json.loads(cli(*words, *engine, *more, "--json")[1])
        return int((answer.get("cluster") or answer["estimate"]["cluster"])["gpus"])

    assert (gpus(), gpus("--gpus", "1"), gpus("--gpus", "2")) == (4, 1, 2)
    assert "1 GPUs a node by the flags, 4 by num_processes" in " ".join(cli(*words, *engine, "--gpus", "1", *why)[1].split())
    following = cli(*words, *engine, "--gpus", "1")[1].partition("Next: ")[2].replace("\\\n", " ")
    assert verb == "recommend" or " --gpus 1 " in following
