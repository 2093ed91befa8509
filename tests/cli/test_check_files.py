"""``zeroplan check`` on files of other programs: what each key decides, what is assumed, what plans leave out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]
LLAMA = "meta-llama/Llama-3.2-1B"
RECIPE = (
    "model_name_or_path: meta-llama/Llama-3.2-1B\ndataset_text_field: text\nper_device_train_batch_size: 2\n"
    "use_peft: true\nload_in_4bit: true\nmax_length: 512\ntorch_compile: true\ntorch_compile_backend: cudagraphs\n"
)
LAUNCHER = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: STAGE}\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "accelerate.yaml").write_text(LAUNCHER.replace("STAGE", "2"))
    return tmp_path / "recipe.yaml", tmp_path / "accelerate.yaml"


def test_a_recipe_with_its_launchers_file(cli: Cli, files: tuple[Path, Path]) -> None:
    code, out, _ = cli("check", *map(str, files), "--wide")
    assert code == 0
    assert out.startswith("OK: TRL 1.16 fills what is open, and DeepSpeed 0.19.8 runs it: stage 2, bf16;")
    assert "\n\nTRL 1.16 (sft, qlora):" in out
    for part in ("micro_batch", "per_device_train_batch_size", "torch_compile (unknown): ", "gpus"):
        assert part in out


def test_a_file_full_of_auto_is_judged_as_the_program_that_fills_it(cli: Cli, files: tuple[Path, Path]) -> None:
    """In a few lines: what runs it, how, and what to ask next; --wide has the keys."""
    ds = files[0].with_name("ds_config.json")
    bits = '"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}'
    ds.write_text('{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", ' + bits + "}")
    code, out, _ = cli("check", str(ds))
    assert code == 0
    assert out.startswith("OK once the HF Trainer or Lightning fills what is open: stage 3.")
    assert len(out.partition("Next:")[0].splitlines()) <= 4
    assert '"auto"' not in out
    wide = " ".join(cli("check", str(ds), "--wide")[1].split())
    assert '"auto" is rejected by DeepSpeed alone' in wide


def test_as_json(cli: Cli, files: tuple[Path, Path]) -> None:
    answer = json.loads(cli("check", *map(str, files), "--json")[1])
    fields = {one["field"]: (one["value"], one["key"]) for one in answer["setup"]["fields"]}
    assert fields["seq_len"] == (512, "max_length")
    assert fields["gpus"] == (8, "num_processes")
    assert answer["ds_config"]["stage"] == 2
    assert {one["key"] for one in answer["setup"]["unmodelled"]} >= {"torch_compile"}


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


def test_with_a_model_it_says_what_the_run_will_use_and_which_knob_helps(cli: Cli, files: tuple[Path, Path]) -> None:
    """The plan is that of estimate --from, its knobs with their flags; what the keys' part says is not said again."""
    ds = files[0].with_name("ds.json")
    ds.write_text('{"train_micro_batch_size_per_gpu": 4, "zero_optimization": true, "bf16": {"enabled": true}}')
    code, out, err = cli("check", str(ds), LLAMA, "--gpus", "8", "--gpu", "A100-40G")
    assert (code, err) == (0, "")
    keys, _, plan = out.partition("\n\nFits: ZeRO-1, ")
    assert keys.startswith("OK, with 1 warning: DeepSpeed 0.19.8 ")
    assert "true means stage 1" in keys
    assert "true means stage 1" not in plan
    assert "Cheapest relief: " in plan
    assert "--micro-batch 2\n" in cli("check", str(ds), LLAMA, "--gpus", "8", "--gpu", "A100-40G", "--wide")[1]
    asked = ("--from", str(ds), "--gpus", "8", "--gpu", "A100-40G")
    estimated = cli("estimate", LLAMA, *asked, "--quiet")[1].splitlines()[-1]
    assert estimated in out
    assert cli("check", str(ds), LLAMA, "--gpus", "8", "--gpu", "A100-40G", "--quiet")[1].strip() == estimated
    answer = json.loads(cli("check", str(ds), LLAMA, "--gpus", "8", "--gpu", "A100-40G", "--json")[1])
    assert answer["stage"] == answer["estimate"]["plans"][0]["stage"] == 1
    code, out, err = cli("check", str(ds), "--gpu", "A100-40G")
    assert (code, out) == (2, "")
    assert "name the model after the files" in err


def test_a_misspelt_file_is_no_model(cli: Cli, files: tuple[Path, Path]) -> None:
    code, out, err = cli("check", str(files[0]), "acelerate.yaml", "--gpu", "H100")
    assert (code, out) == (2, "")
    assert "acelerate.yaml" in err


def test_a_recipe_that_names_its_model_needs_a_machine_alone(cli: Cli, files: tuple[Path, Path]) -> None:
    code, out, _ = cli("check", *map(str, files), "--gpu", "H100", "--quiet")
    assert code == 0
    assert out.startswith(("Fits: ZeRO-2", "Unknown: ZeRO-2"))


MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 128 --num-attention-heads 8 --seq-length 128"
    " --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --vocab-size 512 --tokenizer-type NullTokenizer"
    " --bf16 --num-experts 8 --disable-bias-linear --moe-router-topk "
)


@pytest.mark.parametrize(("taken", "code", "says"), [(2, 0, "Needs "), (99, 2, "--moe-router-topk: more experts a token")])
def test_a_script_that_describes_its_model_and_ranks_is_planned(
    cli: Cli, tmp_path: Path, taken: int, code: int, says: str
) -> None:
    """So what Megatron-LM would refuse of its arguments is refused here, too."""
    (tmp_path / "pretrain.sh").write_text(f"{MEGATRON}{taken}\n")
    found, out, err = cli("check", str(tmp_path / "pretrain.sh"))
    assert found == code
    assert says in out + err
    assert "MODEL" not in out
