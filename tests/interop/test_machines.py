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
    assert (setup.program, setup.value("gpus"), setup.value("nodes")) == ("axolotl", gpus, nodes)
    assert (gpus is None) == any("GPUs open" in one for one in setup.assumed)


@pytest.mark.parametrize(
    ("before", "program", "gpus", "nodes"),
    [
        ("NNODES=2 NPROC_PER_NODE=4", "swift sft --model m --dataset d", 4, 2),
        ("NNODES=2 NPROC_PER_NODE=4", "llamafactory-cli train recipe.yaml", 4, 2),
        ("NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1", "swift sft --model m --dataset d", 2, 1),
    ],
)
def test_nodes_and_processes_by_variables(tmp_path: Path, before: str, program: str, gpus: int, nodes: int) -> None:
    setup = setup_of(tmp_path, FACTORY, f"{before} {program}")
    assert (setup.value("gpus"), setup.value("nodes")) == (gpus, nodes)
    assert "CUDA_VISIBLE_DEVICES" not in {one.key for one in setup.unmodelled}


def test_swift_lays_a_model_over_the_gpus_of_a_process(tmp_path: Path) -> None:
    line = "CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=2 swift sft --model m --dataset d"
    (one,) = [one for one in setup_of(tmp_path, "", line).unmodelled if one.key == "CUDA_VISIBLE_DEVICES"]
    assert (one.effect, "each of 2 processes lays its model over 2 GPUs" in one.says) == ("unknown", True)


@pytest.mark.parametrize(("option", "effect"), [("activation_cpu_offload", "less"), ("new_thing", "unknown")])
def test_an_option_of_fsdp_that_is_not_read_is_listed(tmp_path: Path, option: str, effect: str) -> None:
    recipe = FACTORY + f"fsdp: full_shard auto_wrap\nfsdp_config: {{fsdp_version: 2, fsdp_{option}: true}}\n"
    (one,) = setup_of(tmp_path, recipe, "").unmodelled
    assert (one.key.rpartition(" ")[2], one.effect) == (option, effect)


def test_flags_of_accelerates_launcher_are_no_options_of_fsdp(tmp_path: Path) -> None:
    line = (
        "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 --main_process_port 1 -m axolotl.cli.train recipe.yaml"
    )
    (one,) = setup_of(tmp_path, RECIPE + "lora_mlp_kernel: false\n", line).unmodelled
    assert one.key == "fsdp_config: auto_wrap_policy"  # accelerate's own default: no units


@pytest.mark.parametrize(("recipe", "program"), [(RECIPE + "use_ray: true\n", "axolotl"), (FACTORY, "llama-factory")])
def test_rays_workers_are_gpus(tmp_path: Path, recipe: str, program: str) -> None:
    setup = setup_of(tmp_path, recipe + "ray_num_workers: 4\n", "")
    assert (setup.program, setup.value("gpus")) == (program, 4)
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
