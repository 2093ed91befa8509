"""``verify --from`` and ``explain --from``: a file's run where verify's own loop can do it, else one line that says why not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.validate.small import CONFIG
from zeroplan.core.errors import BadInput
from zeroplan.run.ask import Ask
from zeroplan.validate.api import with_runnable_files

Cli = Callable[..., tuple[int, str, str]]
ARGUMENTS = {
    "output_dir": "o",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-4,
    "bf16": True,
    "max_seq_length": 64,
    "gradient_checkpointing": True,
}


def written(folder: Path, name: str, data: dict[str, Any]) -> str:
    path = folder / name
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.torch
@pytest.mark.usefixtures("warm_ranks")
def test_the_trainers_arguments_are_run_and_equal_the_plan(tmp_path: Path, cli: Cli) -> None:
    model, file = written(tmp_path, "model.json", CONFIG), written(tmp_path, "arguments.json", ARGUMENTS)
    code, out, err = cli("verify", model, "--from", file, "--gpus", "1", "--steps", "2", "--json")
    assert code == 0, out + err
    assert "HF Trainer" in err
    drift = json.loads(out)
    assert drift["workload"]["micro_batch"] == 2
    assert (drift["workload"]["seq_len"], drift["workload"]["gradient_checkpointing"]) == (64, True)
    (one,) = drift["comparisons"]
    assert one["plan"]["engine"] == "ddp"
    peak = next(row for row in one["totals"] if row["name"] == "peak of tensors")
    assert abs(peak["measured"] - peak["planned"]) < 4096


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"model_name_or_path": "m", "packing": False, "max_length": 64}, "no tiled head of TRL"),
        ({"model_name_or_path": "m", "beta": 0.1, "max_length": 64, "dataset_num_proc": 1}, "no step of dpo"),
        ({**ARGUMENTS, "torch_compile": True}, "no compiled graphs"),
        ({**ARGUMENTS, "torch_dtype": "bfloat16"}, r"no weights in bf16 \(torch_dtype\)"),
    ],
)
def test_what_verifys_loop_does_not_do_is_refused_in_one_line(
    data: dict[str, Any], said: str, tmp_path: Path, cli: Cli
) -> None:
    model, file = written(tmp_path, "model.json", CONFIG), written(tmp_path, "run.json", data)
    code, _, error = cli("verify", model, "--from", file)
    assert (code, error.count("\n")) == (2, 1)
    assert re.search(said, error)


def test_a_files_plan_is_derived_line_by_line(tmp_path: Path, cli: Cli) -> None:
    file = written(tmp_path, "ds.json", {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1})
    flags = cli("explain", "openai-community/gpt2", "--stage", "2", "--gpus", "2", "--depth", "formula", "--json")
    files = cli("explain", "openai-community/gpt2", "--from", file, "--gpus", "2", "--depth", "formula", "--json")
    assert files[0] == flags[0] == 0
    assert [one["engine"].split()[0] for one in json.loads(files[1])["plans"]] == ["deepspeed"]
    text = cli("explain", "openai-community/gpt2", "--from", file, "--gpus", "2", "--depth", "formula")[1]
    assert re.search(r"^deepspeed [\d.]+, stage 2", text, re.MULTILINE)


def test_degrees_of_a_file_are_run_on_as_many_ranks_as_it_says_or_they_need(tmp_path: Path) -> None:
    model = written(tmp_path, "model.json", CONFIG)
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    accelerate = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 8,
        "fsdp_config": fsdp,
        "parallelism_config": {"parallelism_config_dp_shard_size": 4, "parallelism_config_cp_size": 2},
    }
    file = written(tmp_path, "accelerate.yaml", accelerate)
    request, _, ranks = with_runnable_files(Ask(model=model, files=(file,), from_scratch=True), None)
    assert (request.engine, request.cp, request.tp, ranks) == ("fsdp2", 2, 1, 8)
    assert not request.accelerate_units  # verify's own loop shards blocks and the root
    titan = '[model]\nname = "llama3"\nflavor = "1B"\n[parallelism]\ntensor_parallel_degree = 2\ncontext_parallel_degree = 2\n'
    (tmp_path / "titan.toml").write_text(titan)
    with pytest.raises(BadInput, match=r"has no model\.name"):  # its own model; what is said of ranks is enough to read it
        with_runnable_files(Ask(model=None, files=(str(tmp_path / "titan.toml"),), from_scratch=True), None)
