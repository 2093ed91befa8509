"""Commands of programs whose files are not read: one line that names them, whatever their flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.interop.readers import read_setup

COMMANDS = {
    "OpenRLHF": "deepspeed --module openrlhf.cli.train_ppo --pretrain m --zero_stage 2 --bf16 --save_steps 1",
    "OpenRLHF ": "ray job submit --address=x -- python3 -m openrlhf.cli.train_ppo_ray --pretrain m --zero_stage 3",
    "verl": "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B trainer.n_gpus_per_node=8",
    "DeepSpeed-Chat": "deepspeed main.py --actor_model_name_or_path a --critic_model_name_or_path b --deepspeed",
}


@pytest.mark.parametrize("title", sorted(COMMANDS))
def test_a_program_of_several_models_is_named(tmp_path: Path, title: str) -> None:
    path = tmp_path / "ppo.sh"
    path.write_text(f"set -x\n{COMMANDS[title]} --per_device_train_batch_size 1 --gradient_accumulation_steps 4\n")
    with pytest.raises(BadInput, match=f"is a command of {title.strip()}, whose files are not read"):
        read_setup(str(path))


def test_a_command_of_diffusers_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "accelerate launch t.py --pretrained_model_name_or_path=x --resolution=512 --gradient_accumulation_steps=1\n"
    )
    with pytest.raises(BadInput, match="a command of diffusers"):
        read_setup(str(path))


def test_one_word_of_trls_makes_no_file_of_trls(tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text("prompt_length: 128000\nmax_prompt_length: 131072\nmax_new_tokens: 120\n")
    with pytest.raises(BadInput, match="none shows whose it is"):
        read_setup(str(path))


def test_a_script_that_analyses_data_does_not_train(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python analyze_data.py --model_name_or_path gpt2 --per_device_train_batch_size 8 --output_dir o\n")
    with pytest.raises(BadInput, match="does not train"):
        read_setup(str(path))
