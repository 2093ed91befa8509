"""How many GPUs the files and commands of programs start."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup

RECIPE = "base_model: m\nadapter: lora\nlora_r: 8\ndatasets: [{path: x, type: alpaca}]\nmicro_batch_size: 2\nsequence_len: 64\n"
FACTORY = "model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: full\ntemplate: llama3\ndataset: x\n"


def setup_of(folder: Path, recipe: str, line: str) -> Setup:
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "run.sh").write_text(line + "\n")
    return read_setup(str(folder / ("run.sh" if line else "recipe.yaml")))


@pytest.mark.parametrize(
    ("line", "gpus", "nodes"),
    [
        ("accelerate launch --num_processes 4 -m axolotl.cli.train recipe.yaml", 4, 1),
        ("accelerate launch --num_processes 16 --num_machines 2 -m axolotl.cli.train recipe.yaml", 8, 2),
        ("torchrun --nproc_per_node 4 --nnodes 2 -m axolotl.cli.train recipe.yaml", 4, 2),
        ("axolotl train recipe.yaml --num-processes 8", 8, 1),
        ("CUDA_VISIBLE_DEVICES=0,1 axolotl train recipe.yaml", 2, 1),
        ("axolotl train recipe.yaml", None, None),
    ],
)
def test_axolotls_commands(tmp_path: Path, line: str, gpus: int | None, nodes: int | None) -> None:
    setup = setup_of(tmp_path, RECIPE, line)
    assert (setup.program, setup.gpus, setup.nodes) == ("axolotl", gpus, nodes)
    assert (gpus is None) == any("GPUs open" in one for one in setup.assumed)


@pytest.mark.parametrize(("recipe", "program"), [(RECIPE + "use_ray: true\n", "axolotl"), (FACTORY, "llama-factory")])
def test_rays_workers_are_gpus(tmp_path: Path, recipe: str, program: str) -> None:
    setup = setup_of(tmp_path, recipe + "ray_num_workers: 4\n", "")
    assert (setup.program, setup.gpus) == (program, 4)
    assert "ray_num_workers 4 on one node" in setup.assumed


@pytest.mark.parametrize(
    ("folder", "more", "task"),
    [
        ("sft", "", "sft"),
        ("dpo", "", "dpo"),
        ("sft", "exp_name: olmo_dpo_7b\n", "dpo"),
        ("sft", "output_dir: /out/rm\n", "reward"),
        ("sft", "output_dir: /out/farm\n", "sft"),
    ],
)
def test_a_recipe_of_open_instruct_is_of_the_task_that_it_speaks_of(tmp_path: Path, folder: str, more: str, task: str) -> None:
    (tmp_path / folder).mkdir()
    path = tmp_path / folder / "run.yaml"
    path.write_text("model_name_or_path: m\nuse_flash_attn: true\nwith_tracking: true\nmax_seq_length: 64\n" + more)
    setup = read_setup(str(path))
    assert (setup.program, setup.task) == ("open-instruct", task)
    assert ("task " + task in {one.key for one in setup.unmodelled}) == (task != "sft")
