"""``zeroplan check`` on files of other programs: what each key decides, what is assumed, what plans leave out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]
RECIPE = (
    "model_name_or_path: meta-llama/Llama-3.2-1B\ndataset_text_field: text\nper_device_train_batch_size: 2\n"
    "use_peft: true\nload_in_4bit: true\nmax_length: 512\n"
)
LAUNCHER = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: STAGE}\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "accelerate.yaml").write_text(LAUNCHER.replace("STAGE", "2"))
    return tmp_path / "recipe.yaml", tmp_path / "accelerate.yaml"


def test_a_recipe_with_its_launchers_file(cli: Cli, files: tuple[Path, Path]) -> None:
    code, out, _ = cli("check", *map(str, files))
    assert code == 0
    assert out.startswith("TRL 1.16 (sft, qlora): ")
    assert "once what is open is filled, it runs: stage 2, bf16" in out
    for part in ("micro_batch", "per_device_train_batch_size", "load_in_4bit (unknown): ", "gpus"):
        assert part in out


def test_as_json(cli: Cli, files: tuple[Path, Path]) -> None:
    answer = json.loads(cli("check", *map(str, files), "--json")[1])
    fields = {one["field"]: (one["value"], one["key"]) for one in answer["setup"]["fields"]}
    assert fields["seq_len"] == (512, "max_length")
    assert fields["gpus"] == (8, "num_processes")
    assert answer["ds_config"]["stage"] == 2
    assert {one["key"] for one in answer["setup"]["unmodelled"]} >= {"load_in_4bit"}


def test_what_deepspeed_refuses_exits_with_2(cli: Cli, files: tuple[Path, Path]) -> None:
    files[1].write_text(LAUNCHER.replace("STAGE", "7"))
    code, out, _ = cli("check", *map(str, files))
    assert (code, "DeepSpeed 0.19.8 refuses this file" in out) == (2, True)


def test_a_ds_config_is_checked_as_before_under_any_name(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}')
    plain, named = cli("check", str(path)), cli("check", str(path), "--program", "ds_config")
    assert plain == named
    assert "runs this file as it is: stage 1" in plain[1]


def test_a_file_of_nobody_is_one_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("colour: green\n")
    code, out, err = cli("check", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
