"""Which program owns a file: by what only it has, else by --program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.interop.readers import read_setup, read_setups

Cli = Callable[..., tuple[int, str, str]]
RECIPE = {
    "model_name_or_path": "meta-llama/Llama-3.2-1B",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "max_length": 512,
    "dataset_text_field": "text",
    "output_dir": "out",
}
OWNERS = {
    "trl": RECIPE,
    "llama-factory": {"model_name_or_path": "m", "finetuning_type": "full", "cutoff_len": 8, "template": "llama3"},
    "axolotl": {"base_model": "m", "datasets": [{"path": "d"}], "micro_batch_size": 1},
    "accelerate": {"distributed_type": "MULTI_GPU", "num_processes": 2, "use_cpu": False},
    "ds_config": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1},
    "hf-trainer": {"output_dir": "out", "per_device_train_batch_size": 1, "learning_rate": 1e-5},
}


@pytest.mark.parametrize("program", OWNERS)
def test_a_file_belongs_to_the_program_that_alone_has_its_keys(program: str) -> None:
    assert read_setup(OWNERS[program]).program == program


def test_a_recipe_of_trl_is_full_fine_tuning_unless_it_says_otherwise() -> None:
    full = read_setup(RECIPE)
    assert (full.task, full.method, full.ask.value("lora_rank")) == ("sft", "full", None)
    ask = full.ask
    assert (ask.micro_batch, ask.grad_accum, ask.seq_len, full.value("gradient_checkpointing")) == (2, 8, 512, True)
    assert full.ask.dtype == "bf16"  # TRL's default where neither bf16 nor fp16 is set
    lora = read_setup({**RECIPE, "use_peft": True, "lora_r": 64, "lora_target_modules": ["q_proj", "v_proj"]})
    assert (lora.method, lora.ask.value("lora_rank"), lora.ask.value("lora_targets")) == ("lora", 64, ("q_proj", "v_proj"))
    quantised = read_setup({**RECIPE, "use_peft": True, "load_in_4bit": True})
    assert (quantised.method, quantised.ask.value("lora_rank")) == ("qlora", 16)
    assert (quantised.ask.value("quantize"), quantised.unmodelled) == (
        "nf4-single",
        (),
    )  # TRL nests quantisation only when asked to
    assert read_setup({**RECIPE, "beta": 0.1}).task == "dpo"


def test_what_two_programs_could_own_needs_a_name(tmp_path: Path, cli: Cli) -> None:
    both = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "learning_rate": 1e-5}
    with pytest.raises(BadInput, match=r"--program hf-trainer or --program trl"):
        read_setup(both)
    assert (read_setup(both, "trl").ask.micro_batch, read_setup(both, "hf-trainer").program) == (8, "hf-trainer")
    with pytest.raises(BadInput, match="trl"):
        read_setup(both, "tlr")
    path = tmp_path / "r.yaml"
    path.write_text("model_name_or_path: openai-community/gpt2\ndataset_name: d\noutput_dir: o\nlearning_rate: 1\n")
    words = ("estimate", "--depth", "formula", "--from", str(path))
    code, out, err = cli(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, _ = cli(*words, "--program", "trl", "--why")
    assert (code, "TRL 1.16 (sft, full)" in out) == (0, True)


def test_a_launchers_file_decides_the_engine_beside_a_recipe(tmp_path: Path) -> None:
    launcher = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 8,
        "num_machines": 2,
        "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": False},
    }
    setup = read_setups([RECIPE, launcher])
    assert (setup.program, setup.value("engine"), setup.value("gpus"), setup.value("nodes"), setup.ask.zero_init) == (
        "trl",
        "deepspeed",
        4,
        2,
        False,
    )
    assert setup.ask.micro_batch == 2
    assert setup.ds_config is not None
    with pytest.raises(BadInput, match="each describe a run"):
        read_setups([RECIPE, OWNERS["axolotl"]])


@pytest.mark.parametrize(
    "data",
    [
        {"distributed_type": "MULTI_CPU", "num_processes": 2},
        {"distributed_type": "NO", "use_cpu": True},
        {**RECIPE, "use_cpu": True},
        {"output_dir": "o", "no_cuda": True, "learning_rate": 1},
    ],
)
def test_runs_on_the_cpu_are_refused_in_one_line(data: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="on the CPU") as error:
        read_setup(data)
    assert "\n" not in str(error.value)


def test_a_path_is_tried_beside_the_file_and_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    recipe = tmp_path / "configs" / "r.yaml"
    recipe.write_text("output_dir: o\nlearning_rate: 1\ndeepspeed: ds.json\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"there is no ds\.json; put it beside that file, or where the run starts"):
        read_setup("configs/r.yaml")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert read_setup("configs/r.yaml").ds_config == {"zero_optimization": {"stage": 1}}
    (tmp_path / "configs" / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert read_setup("configs/r.yaml").ds_config == {"zero_optimization": {"stage": 2}}


def test_yamls_no_is_false(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nmixed_precision: no\nnum_processes: 1\n")
    setup = read_setup(str(path))
    assert (setup.value("engine"), setup.ask.dtype, setup.value("gpus")) == ("ddp", "fp32", 1)


def test_stage_3_without_zero_init_holds_the_whole_model_first(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "accelerate.yaml"
    for flag, expected in (("true", "sharded"), ("false", "whole")):
        path.write_text(
            "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\n"
            f"deepspeed_config: {{zero_stage: 3, zero3_init_flag: {flag}}}\n"
        )
        model = ("meta-llama/Llama-3.2-1B", "--micro-batch", "1", "--seq-len", "64", "--json")
        plan = json.loads(cli("estimate", *model, "--from", str(path))[1])["plans"][0]
        asked = ("--no-zero-init",) if expected == "whole" else ()
        flags = json.loads(cli("estimate", *model, "--stage", "3", "--offload-optimizer", "none", "--gpus", "8", *asked)[1])
        assert plan["gpu"]["phases"]["load"] == flags["plans"][0]["gpu"]["phases"]["load"]
        whole = 2 * 1_235_814_400
        assert (plan["gpu"]["phases"]["load"] >= whole) is (expected == "whole")


@pytest.mark.parametrize(
    ("keys", "task"),
    [
        ({"desirable_weight": 1.0}, "kto"),
        ({"center_rewards_coefficient": 0.01}, "reward"),
        ({"loss_type": "kto"}, "kto"),
        ({"loss_type": "ipo"}, "dpo"),
        ({"lora_task_type": "SEQ_CLS", "use_peft": True}, "reward"),
        ({"beta": 0.1}, "dpo"),
        ({"packing": True, "hub_model_id": "my-kto-run"}, "sft"),
        ({"dataset_num_proc": 4}, "sft"),
    ],
)
def test_the_task_of_a_recipe_follows_from_what_only_its_trainer_has(keys: dict[str, object], task: str) -> None:
    recipe = {key: value for key, value in RECIPE.items() if key != "dataset_text_field"}
    assert read_setup({**recipe, **keys}, "trl").task == task


def test_a_recipe_whose_task_only_its_names_tell_needs_the_flag(tmp_path: Path, cli: Cli) -> None:
    recipe = {key: value for key, value in RECIPE.items() if key != "dataset_text_field"}
    path = tmp_path / "kto" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**recipe, "dataset_name": "trl-lib/kto-mix-14k", "dataset_num_proc": 4}))
    code, _, error = cli("estimate", "--from", str(path), "--depth", "formula")
    assert (code, error.count("\n")) == (2, 1)
    assert "--task sft or --task kto" in error
    assert read_setups([str(path)], None, "kto").task == "kto"
    assert cli("estimate", "--from", str(path), "--task", "kto", "--depth", "formula")[0] == 0
    said = tmp_path / "run.json"
    said.write_text(json.dumps({**recipe, "desirable_weight": 1.0, "model_name_or_path": "m"}))
    with pytest.raises(BadInput, match="change one of the two"):
        read_setups([str(said), {"zero_optimization": {}, "steps_per_print": 1}], None, "pretrain")


def test_a_packed_recipe_without_a_length_has_trls() -> None:
    recipe = {key: value for key, value in RECIPE.items() if key != "max_length"}
    setup = read_setup({**recipe, "packing": True})
    assert (setup.task, setup.ask.seq_len) == ("sft", 1024)
