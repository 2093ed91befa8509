"""Keys of public files that moved memory and were read past: each is now read, listed among what is left out, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.readers import read_setup
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

AXOLOTL = {"base_model": "gpt2", "datasets": [], "sequence_len": 512, "micro_batch_size": 2, "bf16": True}
FLAGS = "--model_name_or_path gpt2 --output_dir o --per_device_train_batch_size 2"


def in_script(folder: Path, line: str) -> str:
    path = folder / "run.sh"
    path.write_text(line + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("keys", "batch"),
    [
        ({"val_set_size": 0.05, "evals_per_epoch": 4}, 2),
        ({"val_set_size": 0.05, "eval_steps": 10, "eval_batch_size": 8}, 8),
        ({"test_datasets": [{"path": "x"}], "eval_strategy": "epoch"}, 2),
        ({"val_set_size": 0.05}, None),  # the Trainer's eval_strategy is "no"
        ({"val_set_size": 0, "evals_per_epoch": 4}, None),
        ({"evals_per_epoch": 4}, None),
    ],
)
def test_axolotl_evaluates_as_often_as_it_is_told(keys: dict[str, Any], batch: int | None) -> None:
    assert read_setup({**AXOLOTL, **keys}).ask.value("eval_batch") == batch


def test_axolotls_checkpoints_are_reentrant_where_it_says_so() -> None:
    on = {**AXOLOTL, "gradient_checkpointing": True}
    assert read_setup({**on, "gradient_checkpointing_kwargs": {"use_reentrant": True}}).ask.value("reentrant") is True
    assert read_setup(on).ask.value("reentrant") is False


def test_axolotls_random_weights_have_a_dtype_of_their_own() -> None:
    """Reported: such a run of SmolLM2 1.7B ran out of 80 GB in its second step, as its plan in fp32 does (80.4 GiB)."""
    (one,) = read_setup({**AXOLOTL, "reinit_weights": True}).unmodelled
    assert (one.key, one.effect) == ("reinit_weights", Effect.MORE)
    assert not read_setup({**AXOLOTL, "reinit_weights": False}).unmodelled


@pytest.mark.parametrize(
    ("flags", "batch"),
    [
        ("--split_dataset_ratio 0.01 --per_device_eval_batch_size 4", 4),
        ("--val_dataset x", 1),
        ("--val_dataset x --eval_strategy no", None),
        ("--val_dataset x --save_strategy no", None),
        ("--per_device_eval_batch_size 4 --eval_strategy steps", None),
    ],
)
def test_ms_swift_evaluates_where_there_is_data_for_it(flags: str, batch: int | None, tmp_path: Path) -> None:
    assert read_setup(in_script(tmp_path, f"swift sft --model m --max_length 512 {flags}")).ask.value("eval_batch") == batch


def test_arguments_of_checkpoints_are_read_from_a_command_line(tmp_path: Path) -> None:
    line = f"python t.py {FLAGS} --gradient_checkpointing --gradient_checkpointing_kwargs '{{\"use_reentrant\": true}}'"
    assert read_setup(in_script(tmp_path, line)).ask.value("reentrant") is True


def test_adapters_beside_all_linear_layers_are_said(tmp_path: Path) -> None:
    line = "swift sft --model m --max_length 512 --target_modules all-linear embed_tokens lm_head"
    (one,) = [one for one in read_setup(in_script(tmp_path, line)).unmodelled if one.key == "target_modules"]
    assert one.says == "adapters on embed_tokens, lm_head beside all linear layers"


def test_a_script_with_its_own_words_for_adapters_is_not_llama_factorys(tmp_path: Path) -> None:
    own = "--lora_rank 64 --trainable q_proj --modules_to_save embed_tokens,lm_head --load_in_kbits 16 --max_seq_length 512"
    setup = read_setup(in_script(tmp_path, f"torchrun run_sft.py {FLAGS} --dataset_dir d {own}"))
    assert (setup.program, setup.ask.seq_len) == ("hf-trainer", 512)
    assert {"modules_to_save", "trainable"} <= {one.key for one in setup.unmodelled}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nanotron": ({"tokens": {"micro_batch_size": 4}, "parallelism": {"dp": 8}, "general": {}}, "a file of nanotron"),
    "GPT-NeoX": ({"pipe-parallel-size": 1, "num-layers": 12, "zero_optimization": {"stage": 1}}, "a file of GPT-NeoX"),
    "LLM Foundry": ({"max_seq_len": 2048, "device_train_microbatch_size": 4, "fsdp_config": {}}, "a file of LLM Foundry"),
    "Megatron under ms-swift": (
        {"model": "m", "tuner_type": "lora", "micro_batch_size": 1, "recompute_granularity": "full"},
        "trains by Megatron-Core",
    ),
    "evaluation in torchtune": (
        {"model": {"_component_": "torchtune.models.llama2.llama2_7b"}, "batch_size": 8},
        "does not train: it has no optimizer",
    ),
    "the CPU in torchtune": (
        {"model": {"_component_": "torchtune.models.llama2.llama2_7b"}, "epochs": 1, "device": "cpu"},
        "asks for training on the CPU",
    ),
    "prediction": (
        {**AXOLOTL, "base_model": None, "output_dir": "o", "learning_rate": 1, "do_predict": True},
        "does not train",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_trains_otherwise_or_not_at_all_is_refused_by_its_name(kind: str) -> None:
    data, said = REFUSED[kind]
    with pytest.raises(BadInput, match=said):
        read_setup({key: value for key, value in data.items() if value is not None})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"python t.py {FLAGS} --do_train False --do_predict True", "do_train: does not train"),
        (f"python export_model.py {FLAGS} --fp16", "export_model.py: does not train"),
        (f"python t.py {FLAGS} --do_infer True", "do_infer: does not train"),
        (f"torchrun finetune.py {FLAGS} --num_layers 24 --num_attention_heads 16 --fp16", "trains by Megatron-LM"),
    ],
)
def test_a_command_that_does_not_train_by_the_trainer_is_refused(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        read_setup(in_script(tmp_path, line))


def test_a_run_that_only_evaluates_by_its_flags_says_what_was_assumed(tmp_path: Path) -> None:
    assert "it trains, though do_train is not set" in read_setup(in_script(tmp_path, f"python t.py {FLAGS} --do_eval")).line


def plans(folder: Path, line: str, **more: Any) -> Any:
    request = Ask(model=None, files=(in_script(folder, line),), gpu="H100", **more)
    return estimate_report(request)


def test_the_allocators_settings_before_a_command_line_are_planned(tmp_path: Path) -> None:
    line = f"torchrun --nproc_per_node 1 t.py {FLAGS.replace('gpt2', 'openai-community/gpt2')} --bf16 --block_size 512"
    (plain,) = plans(tmp_path, line).plans
    (grows,) = plans(tmp_path, f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {line}").plans
    (flag,) = plans(tmp_path, line, alloc_conf="expandable_segments:True").plans
    assert grows.gpu == flag.gpu != plain.gpu
    (other,) = plans(tmp_path, f"export PYTORCH_ALLOC_CONF=backend:cudaMallocAsync\n{line}").plans
    assert other.fits is None
    assert "PYTORCH_ALLOC_CONF" in {one.key for one in other.unmodelled}
    with pytest.raises(BadInput, match=r"--alloc-conf: .* says expandable_segments:True"):
        plans(tmp_path, f"PYTORCH_ALLOC_CONF=expandable_segments:True {line}", alloc_conf="max_split_size_mb:128")


def test_a_model_with_a_vision_tower_needs_images_from_a_flag(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2_vl",
        "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 100,
    }
    run = {"output_dir": "o", "per_device_train_batch_size": 1, "learning_rate": 1e-5, "max_length": 64}
    told = Ask(model=config, files=(run,), gpu="H100", depth="formula")
    assert "images" in {one.key for one in estimate_report(told).plans[0].unmodelled}
    asked = Ask(model=config, gpu="H100", depth="formula", stage=0)
    assert "images" not in {one.key for one in estimate_report(asked).plans[0].unmodelled}
