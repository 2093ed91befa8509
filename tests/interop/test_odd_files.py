"""Files as strangers bring them: each read as its program would, or refused in one line that says what to do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.interop.readers import read_setup
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

Cli = Callable[..., tuple[int, str, str]]
RECIPE = """model_name_or_path: openai-community/gpt2
per_device_train_batch_size: 2
learning_rate: 1.0e-4
bf16: true
packing: false
max_length: 512
"""
AS_JSON = json.dumps({"model_name_or_path": "openai-community/gpt2", "per_device_train_batch_size": 2, "packing": False})
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
FLAGS = "--model_name_or_path gpt2 --output_dir o --per_device_train_batch_size 2"


def put(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


READ: dict[str, tuple[str, str | bytes]] = {
    "a byte order mark": ("r.yaml", b"\xef\xbb\xbf" + RECIPE.encode()),
    "Windows' line ends": ("r.yaml", RECIPE.replace("\n", "\r\n")),
    "old line ends": ("r.yaml", RECIPE.replace("\n", "\r")),
    "an ending in capitals": ("R.YAML", RECIPE),
    "comments": ("r.json", AS_JSON.replace("{", "{ // one\n # two\n /* three */", 1)),
    "a trailing comma": ("r.json", AS_JSON.replace("}", ",}")),
    "numbers in quotes": ("r.yaml", RECIPE.replace(" 2", ' "2"')),
    "a whole float": ("r.yaml", RECIPE.replace(" 2", " 2.0")),
    "anchors and merge keys": (
        "r.yaml",
        "x: &a {per_device_train_batch_size: 2}\n<<: *a\n" + RECIPE.replace("per_device", "#"),
    ),
    "an interpolation": ("r.yaml", RECIPE.replace(" 2", " ${sizes.micro}") + "sizes: {micro: 2}\n"),
    "a key of one's own": ("r.yaml", RECIPE + "my_note: x\n"),
    "TOML": ("r.toml", 'model_name_or_path = "m"\nper_device_train_batch_size = 2\npacking = false\n'),
    "PyYAML's last of two": ("r.yaml", RECIPE.replace(" 2", " 7") + "per_device_train_batch_size: 2\n"),
}


@pytest.mark.parametrize("kind", READ)
def test_what_a_program_would_read(kind: str, tmp_path: Path) -> None:
    name, content = READ[kind]
    setup = read_setup(put(tmp_path, name, content))
    assert (setup.program, setup.ask.micro_batch) == ("trl", 2)


REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "UTF-16": ("r.yaml", RECIPE.encode("utf-16"), "is not UTF-8 .*; save it as UTF-8"),
    "Latin-1": ("r.yaml", RECIPE.encode() + b"run_name: caf\xe9\n", "is not UTF-8"),
    "a tab": ("r.yaml", RECIPE + "fsdp_config:\n\tversion: 2\n", r"line 8, column 1"),
    "two documents": ("r.yaml", f"{RECIPE}---\n{RECIPE}", "holds several documents; give the one"),
    "an include": ("r.yaml", "base: !include b.yaml\n" + RECIPE, "line 1: the tag !include is not read"),
    "a Python object": ("r.yaml", 'x: !!python/object/apply:os.system ["true"]\n', "the tag .* is not read"),
    "a key twice in JSON": ("r.json", AS_JSON.replace("}", ', "packing": 1}'), "'packing' stands twice"),
    "Python's words": ("r.json", AS_JSON.replace("false", "False"), "is not JSON"),
    "a list": ("r.yaml", "- a: 1\n", "holds a list, not an object"),
    "nothing": ("r.yaml", "", "holds null"),
    "a variable": ("r.yaml", RECIPE.replace(" 2", " ${MICRO}"), "'\\$\\{MICRO\\}' is a variable; put its value in"),
    "Hydra's parts": ("r.yaml", "defaults: [base]\n" + RECIPE, "composed of other files by Hydra .* --cfg job"),
    "half a sample": ("r.yaml", RECIPE.replace(" 2", " 2.5"), "is no whole number"),
    "a model's config": ("config.json", json.dumps({**CONFIG, "architectures": []}), "a model's config; give it as MODEL"),
    "a Trainer's log": ("trainer_state.json", '{"log_history": [], "global_step": 1, "train_batch_size": 4}', "Trainer's log"),
    "a tokenizer": ("tokenizer_config.json", '{"tokenizer_class": "T"}', "is a tokenizer's config"),
    "an index": ("model.safetensors.index.json", '{"weight_map": {}}', "index of a checkpoint"),
    "an adapter": (
        "adapter_config.json",
        '{"peft_type": "LORA", "r": 16, "target_modules": ["v_proj", "q_proj"], "base_model_name_or_path": "m"}',
        "an adapter on m; give that model with --lora-rank 16 --lora-targets q_proj,v_proj",
    ),
    "a notebook": ("a.ipynb", '{"cells": [], "nbformat": 4}', "builds no arguments"),
    "pickled arguments": ("training_args.bin", b"PK\x03\x04\xff\xfe", "is not UTF-8"),
    "keys of several programs": ("r.yaml", "output_dir: o\nseed: 1\nlora_alpha: 8\nx: 1\ny: 2\nz: 3\nw: 4\n", "say: --program"),
    "branches": ("r.sh", f"if a; then\n torchrun t.py {FLAGS}\nelse\n torchrun u.py {FLAGS}\nfi\n", "holds 2 commands"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    name, content, said = REFUSED[kind]
    with pytest.raises(BadInput, match=said) as caught:
        read_setup(put(tmp_path, name, content))
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path, cli: Cli) -> None:
    put(tmp_path, "checkpoint-500/adapter_config.json", "{}")
    for path, said in (
        ("-", "standard input is not read"),
        (
            str(tmp_path / "checkpoint-500"),
            "is a folder, not a file; give the file of the run's arguments: adapter_config.json",
        ),
        ("meta-llama/Llama-3.1-8B", "no such file"),
        ("/dev/zero", "is a device"),
    ):
        code, _, error = cli("estimate", "--from", path)
        assert (code, error.count("\n")) == (2, 1)
        assert said in error


SCRIPTS = {
    "a string": f'ARGS="{FLAGS}"\ntorchrun --nproc_per_node=8 t.py $ARGS\n',
    "a string that grows": f'ARGS="{FLAGS[:27]}"\nARGS+="{FLAGS[27:]}"\ntorchrun --nproc_per_node=8 t.py $ARGS\n',
    "an array": f'ARGS=(\n  {FLAGS} # a comment\n)\ntorchrun --nproc_per_node=8 t.py "${{ARGS[@]}}"\n',
    "two arrays": f"A=({FLAGS[:25]})\nA+=({FLAGS[25:]})\ntorchrun --nproc_per_node 8 t.py ${{A[@]}}\n",
    "a caret": f"torchrun --nproc_per_node=8 t.py ^\r\n {FLAGS}\r\n",
    "a text over lines": f'D="\n  --nproc_per_node 8\n"\ntorchrun $D t.py {FLAGS}\n',
    "arguments with defaults": f"M=gpt3\nM=${{1}}\nB=$2\nB=${{B:-2}}\ntorchrun --nproc_per_node=8 t.py {FLAGS[:-1]}$B\n",
    "GPUs by number": f"deepspeed --include localhost:0,1,2,3,4,5,6,7 t.py {FLAGS}\n",
    "visible GPUs": f"CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 deepspeed t.py {FLAGS}\n",
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_scripts_ways_of_saying_the_same(kind: str, tmp_path: Path) -> None:
    setup = read_setup(put(tmp_path, "run.sh", SCRIPTS[kind]))
    assert (setup.program, setup.ask.model, setup.ask.micro_batch, setup.value("gpus")) == ("hf-trainer", "gpt2", 2, 8)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"torchrun --nproc_per_node $1 t.py {FLAGS}", "torchrun gets '$1', so give --gpus"),
        (f"torchrun $MORE t.py {FLAGS}", "torchrun gets '$MORE'"),
        (f"deepspeed t.py {FLAGS}", "deepspeed takes all of the machine"),
        (f"accelerate launch t.py {FLAGS}", "accelerate takes all of the machine"),
        ("llamafactory-cli train --stage sft --model_name_or_path m --finetuning_type full", "llamafactory-cli takes all"),
    ],
)
def test_gpus_that_a_launcher_leaves_open_are_said(line: str, said: str, tmp_path: Path) -> None:
    setup = read_setup(put(tmp_path, "run.sh", line + "\n"))
    assert setup.value("gpus") is None
    assert said in setup.line


def test_several_gpus_without_a_launcher_are_no_plan_of_one(tmp_path: Path) -> None:
    lines = {
        f"CUDA_VISIBLE_DEVICES=0,1 python t.py {FLAGS}\n": "DataParallel",
        "CUDA_VISIBLE_DEVICES=0,1 swift sft --model m --max_length 512\n": "NPROC_PER_NODE",
    }
    for line, said in lines.items():
        (one,) = [one for one in read_setup(put(tmp_path, "run.sh", line)).unmodelled if one.key == "CUDA_VISIBLE_DEVICES"]
        assert said in one.says
    line = "NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 swift sft --model m --max_length 512\n"
    assert read_setup(put(tmp_path, "run.sh", line)).value("gpus") == 2


def test_a_path_from_the_root_of_a_repository_is_found(tmp_path: Path) -> None:
    put(tmp_path, "configs/ds.json", '{"zero_optimization": {"stage": 3}}')
    script = put(tmp_path, "scripts/train/run.sh", f"torchrun t.py {FLAGS} --deepspeed configs/ds.json\n")
    assert (read_setup(script).ds_config or {})["zero_optimization"] == {"stage": 3}
    with pytest.raises(BadInput, match=r"there is no configs/no.json; put it beside that file"):
        read_setup(put(tmp_path, "scripts/train/run.sh", f"torchrun t.py {FLAGS} --deepspeed configs/no.json\n"))


SCRIPTS_OF_THEIR_OWN = {
    "another word for the rank": ({"lora_rank": 64, "lora_alpha": 16, "max_seq_length": 1024}, ("lora", 64), set()),
    "a mode": ({"train_mode": "qlora", "lora_rank": 64}, ("lora", 64), {"train_mode"}),
    "a switch for a task": ({"use_dpo": True, "max_seq_length": 64}, ("full", None), {"use_dpo"}),
    "an attention": ({"flash_attn": True, "use_peft": True, "lora_rank": 8}, ("lora", 8), {"flash_attn"}),
}


@pytest.mark.parametrize("kind", SCRIPTS_OF_THEIR_OWN)
def test_a_script_of_its_own_is_read_as_one_on_the_trainer(kind: str) -> None:
    keys, expected, left_out = SCRIPTS_OF_THEIR_OWN[kind]
    plain = {"model_name_or_path": "gpt2", "output_dir": "o", "per_device_train_batch_size": 1, "bf16": True}
    setup = read_setup({**plain, **keys})
    assert (setup.program, setup.method, setup.ask.value("lora_rank")) == ("hf-trainer", *expected)
    assert left_out <= {one.key for one in setup.unmodelled}


@pytest.mark.parametrize(("script", "task"), [("dpo_training.py", "dpo"), ("run_rm.py", "reward"), ("train.py", "")])
def test_the_name_of_a_script_tells_its_task(script: str, task: str, tmp_path: Path) -> None:
    setup = read_setup(put(tmp_path, "run.sh", f"torchrun --nproc_per_node 2 {script} {FLAGS} --lora_rank 8 --use_peft True\n"))
    assert (setup.program, setup.task) == ("hf-trainer", task)
    assert (f"task {task}" in {one.key for one in setup.unmodelled}) is bool(task)


def test_a_models_path_is_found_beside_the_file(tmp_path: Path) -> None:
    put(tmp_path, "models/config.json", json.dumps(CONFIG))
    setup = read_setup(put(tmp_path, "r.yaml", RECIPE.replace("openai-community/gpt2", "./models")))
    assert setup.ask.model == str(tmp_path / "models")


def test_a_checkpoint_with_an_adapter_alone_names_its_model(tmp_path: Path) -> None:
    put(tmp_path, "adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8}')
    with pytest.raises(BadInput, match="holds an adapter on org/base; give that model"):
        load_model(str(tmp_path))


def test_a_quantised_checkpoints_config_is_no_promise() -> None:
    for method in ("gptq", "awq", "fp8", "bitsandbytes"):
        model = {**CONFIG, "quantization_config": {"quant_method": method}}
        plan = estimate_report(Ask(model=model, stage=0, gpu="H100", depth="formula")).plans[0]
        assert plan.fits is None
        assert any(one.key == "quantization_config" and method in one.says for one in plan.unmodelled)


@pytest.mark.parametrize("value", [["sft"], {"a": 1}, "x" * 5000, True, 7])
def test_values_of_any_kind_are_read_or_refused(value: object) -> None:
    for key in ("stage", "deepspeed", "model_name_or_path", "loss_type", "fsdp_config", "optim", "task_type"):
        for owner in ({"finetuning_type": "full"}, {"packing": False}, {"output_dir": "o", "learning_rate": 1}):
            with contextlib.suppress(BadInput):
                read_setup({"model_name_or_path": "m", **owner, key: value})


def test_a_launchers_switch_without_its_file_is_no_path(tmp_path: Path) -> None:
    line = f"accelerate launch --config_file --num_processes 2 t.py {FLAGS}\n"
    assert read_setup(put(tmp_path, "run.sh", line)).value("gpus") == 2


def test_variables_that_double_do_not_fill_the_machine(tmp_path: Path) -> None:
    lines = "".join(f"V{i}=$V{i - 1}$V{i - 1}\n" for i in range(1, 4000)) + f"torchrun t.py {FLAGS} --run_name $V3999\n"
    with pytest.raises(BadInput, match="too long with its variables put in"):
        read_setup(put(tmp_path, "run.sh", "V0=aaaa\n" + lines))
