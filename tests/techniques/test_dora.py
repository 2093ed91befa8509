"""DoRA: its parameters are peft's, its files are read and written, and what it conflicts with is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.validate.small import CONFIG
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Workload
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.tape.options import options_for
from zeroplan.techniques.dora import Dora
from zeroplan.techniques.table import techniques_of

Cli = Callable[..., tuple[int, str, str]]
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97}


@pytest.mark.torch
@pytest.mark.parametrize("config", [CONFIG, GPT2], ids=["llama", "gpt2"])
def test_the_models_parameters_are_those_of_peft(config: dict[str, Any]) -> None:
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(config["model_type"], **values))
        model = get_peft_model(made, LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    theirs = [(name.removeprefix("base_model.model."), tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    (case,) = resolve(Ask(model=config, engine="ddp", lora_rank=4, dora=True, seq_len=64)).cases
    shapes = case.spec.parameters
    ours = list(zip(shapes.names, shapes.shapes, shapes.trainable, strict=True))
    assert sorted(ours) == sorted(theirs)
    assert sum(name.endswith("magnitude_vector.default.weight") for name, *_ in ours) > 4


@pytest.mark.long
@pytest.mark.torch
def test_verify_measures_what_is_planned(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ("--engine", "ddp", "--lora-rank", "4", "--dora", "--gpus", "1", "--seq-len", "64", "--json")
    code, out, error = cli("verify", str(tmp_path), *words)
    assert code == 0, error  # 3 where a measured figure is outside
    assert json.loads(out)["workload"]["dora"] is True


def test_a_tape_of_its_own(tmp_path: Path) -> None:
    plain = Workload.of(seq_len=8)
    assert options_for(plain.with_techniques(Dora())).key == options_for(plain).key + "_dora"


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("trl", "dataset_name: x\nuse_peft: true\nlora_r: 8\nuse_dora: true\nmax_length: 64\npacking: true"),
        (
            "llama-factory",
            "stage: sft\nfinetuning_type: lora\nlora_rank: 8\nuse_dora: true\ncutoff_len: 64\ndataset: x\ntemplate: x",
        ),
        ("axolotl", "adapter: lora\nlora_r: 8\npeft_use_dora: true\nsequence_len: 64\ndatasets: []\nlora_target_linear: true"),
        ("ms-swift", "train_type: lora\nlora_rank: 8\nuse_dora: true\nmax_length: 64\ndataset: x"),
    ],
)
def test_files_of_programs_ask_for_it(program: str, text: str, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "run.yaml"
    key = {"axolotl": "base_model", "ms-swift": "model"}.get(program, "model_name_or_path")
    file.write_text(f"{key}: {tmp_path}\n{text}\n")
    code, out, error = cli(
        "estimate", "--from", str(file), "--program", program, "--engine", "ddp", "--depth", "formula", "--json"
    )
    assert code == 0, error
    assert json.loads(out)["workload"]["dora"] is True
    assert "dora" not in json.dumps(json.loads(out)["plans"])


@pytest.mark.long
def test_a_written_adapter_config_asks_for_it(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ("--lora-rank", "4", "--dora", "--engine", "deepspeed", "--gpu", "H100", "--seq-len", "64")
    code, _, error = cli("recommend", str(tmp_path), *words, "-o", str(tmp_path / "ds.json"))
    assert code == 0, error
    assert json.loads((tmp_path / "adapter_config.json").read_text())["use_dora"] is True


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"engine": "ddp", "lora_rank": None}, "without adapters"),
        ({"engine": "fsdp"}, "not modelled under fsdp"),
        ({"engine": "ddp", "quantize": "nf4"}, "norms read the base"),
        ({"engine": "ddp", "compile": "blocks"}, "compiled blocks with DoRA"),
        ({"engine": "deepspeed", "stage": 3}, "stage 3 has released"),
    ],
)
def test_what_it_conflicts_with_is_said(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        resolve(Ask(**{"model": CONFIG, "dora": True, "lora_rank": 4, "seq_len": 64, **asked}))


def test_tables_leave_out_stages_that_it_has_not() -> None:
    cases = resolve(Ask(model=CONFIG, engine="deepspeed", gpus=2, dora=True, lora_rank=4, seq_len=64)).cases
    assert {case.zero.stage for case in cases} == {0, 1, 2}
    assert Dora() in [value for _, value in techniques_of(cases[0].workload)]
