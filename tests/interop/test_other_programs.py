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
