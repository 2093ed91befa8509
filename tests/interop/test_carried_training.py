"""What a run in use says of its training goes into the files that are written for it, or is named among what they leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroplan.interop.training import read_training
from zeroplan.run.ask import Ask
from zeroplan.search.api import run_search
from zeroplan.search.files import Files, Target, files_of
from zeroplan.search.search_options import SearchOptions

ARGUMENTS = {
    "output_dir": "o",
    "per_device_train_batch_size": 2,
    "bf16": True,
    "max_seq_length": 512,
    "learning_rate": 1e-5,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_ratio": 0.03,
    "lr_scheduler_type": "cosine",
}
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
}


def written(folder: Path, source: Any, form: str, *, engine: str = "deepspeed", new: bool = False) -> Files:
    (folder / "source.json").write_text(json.dumps(source))
    request = Ask(model="openai-community/gpt2", gpus=2, vram="24G", seq_len=512, engine=engine, depth="formula")
    found = run_search(request, SearchOptions(source=[str(folder / "source.json")], explain=False, shown=1))
    target = Target(f"{folder}/run/", form, new_script=f"{folder}/train.py" if new else None)
    return files_of(found.ranking[0], found.cluster, target, found.loaded, found.training)


def _json(files: Files, name: str) -> Any:
    return json.loads(next(text for path, text in files.texts.items() if path.endswith(name)))


def test_the_trainers_command_has_them(tmp_path: Path) -> None:
    files = written(tmp_path, ARGUMENTS, "trainer")
    for words in (
        "learning_rate 1e-05",
        "adam_beta2 0.95",
        "max_grad_norm 0.5",
        "warmup_ratio 0.03",
        "lr_scheduler_type cosine",
    ):
        assert f"--{words}" in files.start.command
    said = _json(files, "training_arguments.json")
    assert (said["learning_rate"], said["max_grad_norm"], said["warmup_steps"]) == (1e-5, 0.5, 0.03)  # transformers 5's name
    assert any("add output_dir of" in one for one in files.notes)
    assert not any("no learning rate" in one for one in files.notes)


def test_an_explicit_ds_config_has_what_deepspeed_takes_and_the_rest_is_named(tmp_path: Path) -> None:
    files = written(tmp_path, ARGUMENTS, "explicit")
    config = _json(files, "ds_config.json")
    assert config["optimizer"]["params"] == {"lr": 1e-5, "weight_decay": 0.1, "betas": [0.9, 0.95]}
    assert config["gradient_clipping"] == 0.5
    (note,) = [one for one in files.notes if "no written file does" in one]
    assert "lr_scheduler_type cosine, warmup_ratio 0.03; set them" in note


def test_a_ds_config_keeps_its_rate_its_schedule_and_that_it_clips_nothing(tmp_path: Path) -> None:
    config = _json(written(tmp_path, DS_CONFIG, "explicit"), "ds_config.json")
    assert config["optimizer"]["params"] == DS_CONFIG["optimizer"]["params"]  # type: ignore[index]
    assert (config["scheduler"], config["gradient_clipping"]) == (DS_CONFIG["scheduler"], 0.0)
    files = written(tmp_path, DS_CONFIG, "trainer")
    assert _json(files, "ds_config.json")["scheduler"] == DS_CONFIG["scheduler"]
    assert "--warmup_steps 100" in files.start.command  # which the Trainer holds against the schedule's
    assert "--learning_rate 0.0003" in files.start.command


def test_a_script_of_torch_steps_and_clips_by_them(tmp_path: Path) -> None:
    files = written(tmp_path, ARGUMENTS, "torch", engine="ddp", new=True)
    text = files.texts[f"{tmp_path}/train.py"]
    assert "torch.optim.AdamW(trainable, lr=1e-05, weight_decay=0.1, betas=(0.9, 0.95)" in text
    assert "clip_grad_norm_(trainable, 0.5)" in text
    assert "The learning rate 1e-05 is that of the run in use." in text
    unclipped = written(tmp_path, {**ARGUMENTS, "max_grad_norm": 0.0}, "torch", engine="ddp", new=True)
    assert "clip_grad_norm_(trainable, float('inf'))" in unclipped.texts[f"{tmp_path}/train.py"]


def test_adapters_have_their_scale_and_dropout(tmp_path: Path) -> None:
    recipe = {
        "base_model": "openai-community/gpt2",
        "adapter": "lora",
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_linear": True,
        "datasets": [{"path": "x", "type": "alpaca"}],
        "sequence_len": 512,
        "micro_batch_size": 2,
        "learning_rate": "2e-4",
        "bf16": True,
    }
    files = written(tmp_path, recipe, "explicit")
    adapters = _json(files, "adapter_config.json")
    assert (adapters["lora_alpha"], adapters["lora_dropout"]) == (32, 0.05)
    assert _json(files, "ds_config.json")["optimizer"]["params"]["lr"] == 2e-4
    del recipe["lora_alpha"]
    assert any("says no lora_alpha" in one for one in written(tmp_path, recipe, "explicit").notes)


@pytest.mark.parametrize(
    ("data", "values", "others"),
    [
        ({"optimizer": {"lr": 2e-5, "betas": [0.8, 0.9]}}, {"learning_rate": 2e-5, "adam_beta1": 0.8, "adam_beta2": 0.9}, {}),
        ({"learning_rate": "1e-5", "lr": "auto"}, {"learning_rate": 1e-5}, {}),
        ({"learning_rate": "$LR", "min_lr": 1e-6}, {}, {"learning_rate": "$LR", "min_lr": 1e-6}),
        ({"lr_scheduler": "cosine", "seed": True}, {}, {"lr_scheduler": "cosine", "seed": True}),
    ],
)
def test_names_and_values_of_programs(data: dict[str, Any], values: dict[str, Any], others: dict[str, Any]) -> None:
    found = read_training(data, "f")
    assert (found.values, found.others) == (values, others)
