"""Changes of a user's own files: a value changes, all else stays to the character, and the files then say what is planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroplan.interop.edits.texts import (
    REMOVED,
    UneditableError,
    edit_environment,
    edit_json,
    edit_python,
    edit_shell,
    edit_yaml,
)

Cli = Callable[..., tuple[int, str, str]]

JSON = '{\n    "bf16": {"enabled": "auto"},\n    "zero": {\n        "stage": 3,\n        "param": {"device": "cpu"}\n    }\n}\n'
YAML = "# mine\nfsdp:\n  version: 2  # two\n  units:\n  - a\n  - b\n\ndtype: bf16\n"
SHELL = "#!/bin/bash\n# train.py --size 9\ntorchrun train.py \\\n    --size 4 \\\n    --data=x --lr $LR\n"
PYTHON = "args = Arguments(\n    'é',\n    size=4,  # small\n    fast=True,\n)\n"


@pytest.mark.parametrize(
    ("edit", "text", "path", "value", "was", "becomes"),
    [
        (edit_json, JSON, ["zero", "stage"], 2, '"stage": 3', '"stage": 2'),
        (edit_json, JSON, ["bf16", "enabled"], True, '"auto"', "true"),
        (edit_json, JSON, ["zero", "stage"], REMOVED, '"stage": 3,\n        ', ""),
        (edit_json, JSON, ["zero", "param"], REMOVED, ',\n        "param": {"device": "cpu"}', ""),
        (edit_json, JSON, ["clip"], 1.0, "    }\n}", '    },\n    "clip": 1.0\n}'),
        (edit_json, JSON, ["bf16", "x"], 1, '"auto"}', '"auto", "x": 1}'),
        (edit_json, JSON, ["none"], REMOVED, "", ""),
        (edit_yaml, YAML, ["fsdp", "version"], 1, "version: 2  # two", "version: 1  # two"),
        (edit_yaml, YAML, ["fsdp", "offload"], True, "  - b\n", "  - b\n  offload: true\n"),
        (edit_yaml, YAML, ["dtype"], "no", "dtype: bf16", 'dtype: "no"'),
        (edit_yaml, YAML, ["dtype"], REMOVED, "dtype: bf16\n", ""),
        (edit_yaml, YAML, ["batch"], 4, "bf16\n", "bf16\nbatch: 4\n"),
        (lambda text, path, value: edit_shell(text, path[0], value), SHELL, ["size"], 8, "    --size 4", "    --size 8"),
        (lambda text, path, value: edit_shell(text, path[0], value), SHELL, ["data"], "y z", "--data=x", "--data='y z'"),
        (lambda text, path, value: edit_shell(text, path[0], value), SHELL, ["lr"], 0.1, "$LR", "0.1"),
        (
            *(lambda text, path, value: edit_shell(text, path[0], value, ["data", "size"]), SHELL, ["new"], 1),
            *("    --size 4", "    --new 1 \\\n    --size 4"),
        ),
        (lambda text, path, value: edit_python(text, path[0], value), PYTHON, ["size"], 8, "size=4", "size=8"),
        (
            *(lambda text, path, value: edit_python(text, path[0], value, ["fast"]), PYTHON, ["file"], "a"),
            *("    fast", '    file="a",\n    fast'),
        ),
    ],
)
def test_one_value_changes(edit: Callable[..., str], text: str, path: list[str], value: Any, was: str, becomes: str) -> None:
    assert not was or text.count(was) == 1
    assert edit(text, path, value) == (text.replace(was, becomes) if was else text)


@pytest.mark.parametrize(
    "edit",
    [
        lambda: edit_json("{// mine\n}", ["a"], 1),
        lambda: edit_json('{"a": 1}', ["a", "b"], 1),
        lambda: edit_json("{", ["a"], 1),
        lambda: edit_yaml("a: {b: 1}\n", ["a", "b"], 1),
        lambda: edit_yaml("a:\n- 1\n", ["a"], 1),
        lambda: edit_yaml("a: |\n  x\n", ["a"], 1),
        lambda: edit_yaml("a: 1\na: 2\n", ["a"], 1),
        lambda: edit_shell("x --a 1\ny --a 2\n", "a", 3),
        lambda: edit_shell("x # --a 1\n", "b", 3, ["a"]),
        lambda: edit_python("f(a=1)\ng(a=2)\n", "a", 3),
        lambda: edit_python("f(a=b)\n", "a", 3),
        lambda: edit_python("f(", "a", 3),
    ],
)
def test_what_is_said_in_another_way_is_left_alone(edit: Callable[[], str]) -> None:
    with pytest.raises(UneditableError):
        edit()


def test_the_environment_of_a_script() -> None:
    assert edit_environment("#!/bin/sh\n\nrun\n", ["A", "B"], "x:1") == "#!/bin/sh\n\nexport A=x:1 B=x:1\nrun\n"
    assert edit_environment("A=old run\n", ["A", "B"], "x:1") == "A=x:1 run\n"


DS_CONFIG = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
ARGUMENTS = (
    "--model_name_or_path HuggingFaceTB/SmolLM2-135M --per_device_train_batch_size 1 \\\n"
    "    --gradient_accumulation_steps 8 --max_seq_length 512 --bf16 True --gradient_checkpointing True --output_dir out"
)
RECIPE = (
    "model_name_or_path: HuggingFaceTB/SmolLM2-135M  # small\nstage: sft\nfinetuning_type: full\ncutoff_len: 512\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nbf16: true\ndataset: mine\noutput_dir: out\n"
)
FSDP2 = (
    "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_reshard_after_forward: true\n  fsdp_activation_checkpointing: true  # less memory\nmixed_precision: bf16\n"
    "num_processes: 2\n"
)
#: Files of a run by name, the one that is given first, and the command that starts the copies.
RUNS: dict[str, tuple[dict[str, str], str]] = {
    "deepspeed": (
        {
            "train.sh": f"deepspeed --num_gpus 2 train.py --deepspeed ds.json {ARGUMENTS}\n",
            "ds.json": json.dumps(DS_CONFIG, indent=2),
        },
        "bash run/train.sh",
    ),
    "fsdp2": (
        {"train.sh": f"accelerate launch --config_file fsdp.yaml train.py {ARGUMENTS}\n", "fsdp.yaml": FSDP2},
        "bash run/train.sh",
    ),
    "llama-factory": (
        {"recipe.yaml": f"{RECIPE}deepspeed: ds.json\n", "ds.json": json.dumps(DS_CONFIG, indent=2)},
        "llamafactory-cli train run/recipe.yaml",
    ),
    "ddp": ({"train.sh": f"torchrun --nproc_per_node 2 train.py {ARGUMENTS}\n"}, "bash run/train.sh"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ("ddp", "llama-factory") else name for name in RUNS]
)
def test_the_users_files_with_what_changes_are_what_was_predicted(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files, start = RUNS[name]
    for path, text in files.items():
        Path(path).write_text(text)
    (tmp_path / "train.py").write_text("from transformers import HfArgumentParser, TrainingArguments\n")
    asked = ("--from", next(iter(files)), "--gpu", "2xA100-80G")
    _, out, err = cli("recommend", *asked, "-o", "run/", "--json")
    assert not err
    found = json.loads(out)
    assert found["files"]["start"].endswith(start)
    assert {Path(path).name for path in found["files"]["written"]} == {"train.sh", "recipe.yaml", *files} & set(files)
    for path, text in files.items():
        assert Path(path).read_text() == text
        lines, written = set(text.splitlines()), Path("run", path).read_text()
        assert len(lines - set(written.splitlines())) <= 6
    best, run = found["ranking"][0], found["patched"]["run"]
    assert found["patched"]["left"] == []
    assert run["plan"]["engine"] == {"fsdp2": "fsdp2", "ddp": "ddp"}.get(name, "deepspeed")
    for key in ("micro_batch", "grad_accum", "gradient_checkpointing"):
        assert run[key] == best[key]
    again = json.loads(cli("recommend", "--from", f"run/{next(iter(files))}", "--gpu", "2xA100-80G", "--json")[1])
    assert again["current"]["plan"]["gpu"]["total"] == run["plan"]["gpu"]["total"]
    assert again["current"]["tokens_per_second"] == run["tokens_per_second"]
    if name == "deepspeed":
        written = Path("run/ds.json").read_text()
        assert '"stage3_gather_16bit_weights_on_model_save": true' in written
        assert written.count('"auto"') == json.dumps(DS_CONFIG).count('"auto"')
        assert "--deepspeed run/ds.json" in Path("run/train.sh").read_text()
    assert cli("recommend", *asked, "-o", "run/", "--quiet")[0] == 0  # over its own
    Path("run", next(iter(files))).write_text("mine")
    code, _, err = cli("recommend", *asked, "-o", "run/")
    assert code == 2
    assert "was changed since recommend wrote it" in err
    assert Path("run", next(iter(files))).read_text() == "mine"


def test_a_run_without_deepspeed_gets_its_file_where_it_is_asked_for(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(RUNS["ddp"][0]["train.sh"])
    cli("recommend", "--from", "train.sh", "--gpu", "2xA100-80G", "--engine", "deepspeed", "-o", "run/", "--quiet")
    assert "--deepspeed run/ds_config.json" in Path("run/train.sh").read_text()
    assert json.loads(Path("run/ds_config.json").read_text())["train_micro_batch_size_per_gpu"] == "auto"
    assert not Path("ds_config.json").exists()


def test_several_files_need_a_folder(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, text in RUNS["deepspeed"][0].items():
        Path(path).write_text(text)
    code, _, err = cli("recommend", "--from", "train.sh", "--gpu", "2xA100-80G", "-o", "new.json")
    assert code == 2
    assert "2 files change: train.sh and ds.json; give a folder/ for their copies" in err
    assert not Path("new.json").exists()
