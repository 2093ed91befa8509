"""Degrees of parallelism in programs' files: planned, listed as left out, or refused in one line that names the divisor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import dump_yaml
from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup
from zeroplan.planner.merge import merge, with_files
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 8192
[activation_checkpoint]
mode = "full"
[parallelism]
"""
AXOLOTL = {"base_model": "meta-llama/Llama-3.1-8B", "sequence_len": 512, "micro_batch_size": 1, "fsdp_version": 2}
AXOLOTL |= {"fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}}
Write = Callable[[str, str], str]


@pytest.fixture
def titan(tmp_path: Any) -> Callable[[str], str]:
    """Write a TOML of torchtitan with these lines in ``[parallelism]``."""

    def write(lines: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(TITAN + lines)
        return str(path)

    return write


def asked(source: Any, **given: Any) -> Ask:
    return with_files(Ask(files=(source,), depth="formula", vram="80G", **given))[0]


def keys_of(setup: Setup) -> set[str]:
    return {one.key for one in setup.unmodelled}


def test_torchtitans_degrees_are_planned(titan: Callable[[str], str]) -> None:
    """``tests/integration_tests`` of torchtitan write such sections; sequence parallelism goes with its tensor parallelism."""
    request = asked(titan("tensor_parallel_degree = 2\ncontext_parallel_degree = 2"), gpus=8)
    assert (request.engine, request.stage, request.model) == ("fsdp2", 3, "meta-llama/Llama-3.1-8B")
    assert (request.tp, request.sp, request.cp, request.pp, request.micro_batch) == (2, True, 2, 1, 4)
    assert (request.dtype, request.value("gradient_checkpointing"), request.value("checkpoint_policy")) == (
        "bf16",
        True,
        "full",
    )
    assert {one.key for one in request.unmodelled} == {"model.name"}  # its own model code
    (case,) = resolve(request).cases
    assert (case.layout.dp, case.layout.shard_group) == (2, 4)

    setup = read_setup(titan("tensor_parallel_degree = 2"))
    assert "parallelism.tensor_parallel_degree" in keys_of(setup)  # for a search, which plans data parallelism alone
    assert merge(Ask(files=()), setup).tp == 1


def test_torchtitans_pipelines(titan: Callable[[str], str]) -> None:
    """A rank's batch is divided into micro batches; looped schedules have two chunks a rank; nothing is resharded."""
    lines = (
        "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'\npipeline_parallel_microbatch_size = 2"
    )
    request = asked(titan(lines), gpus=8)
    assert (request.pp, request.vpp, request.schedule, request.stage) == (2, 2, "1f1b", 2)
    assert (request.micro_batch, request.grad_accum) == (2, 2)
    halved = asked(titan("pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'InterleavedZeroBubble'"), gpus=8)
    assert (halved.vpp, halved.schedule) == (2, "zero-bubble")
    with pytest.raises(BadInput, match=r"3 does not divide training\.local_batch_size 4"):
        read_setup(titan("pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3"))
    for name, schedule in (("ZBVZeroBubble", "zbv"), ("DualPipeV", "dualpipev")):
        folded = asked(titan(f"pipeline_parallel_degree = 2\npipeline_parallel_schedule = '{name}'"), gpus=8)
        assert (folded.vpp, folded.schedule) == (2, schedule)
    with pytest.raises(BadInput, match="the schedule dualpipe is not modelled"):
        read_setup(titan("pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'DualPipe'"))
    both = read_setup(titan("pipeline_parallel_degree = 2\ntensor_parallel_degree = 2"))
    assert "sequence parallelism" in keys_of(both)
    assert "sp" not in both.degrees


def test_torchtitans_replicas_and_global_batch(titan: Callable[[str], str]) -> None:
    request = asked(titan("data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4"))
    assert (request.gpus, request.dp_replicate, request.engine) == (8, 2, "fsdp2")
    assert asked(titan("data_parallel_shard_degree = 8"), gpu="8xH100").gpus == 1  # the flag holds the count
    (case,) = resolve(request).cases
    assert (case.layout.dp, case.layout.shard_group, case.layout.communicators) == (8, 4, 2)
    plain = asked(titan("data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1"))
    assert (plain.gpus, plain.engine, plain.dp_replicate) == (8, "ddp", 1)
    batch = {"training.global_batch_size": 64, "training.local_batch_size": 2, "parallelism.tensor_parallel_degree": 2}
    assert asked(batch | {"training.seq_len": 512, "model.flavor": "8B"}, gpus=8).grad_accum == 8
    with pytest.raises(BadInput, match="4 data-parallel ranks × 2 samples do not divide the global batch of 36"):
        asked(batch | {"training.global_batch_size": 36, "model.flavor": "8B"}, gpus=8)


@pytest.mark.parametrize(
    ("lines", "gpus", "said"),
    [
        ("tensor_parallel_degree = 3", 8, "tp 3 does not divide 1 × 8 = 8 ranks"),
        ("tensor_parallel_degree = 8", 1, "tp 8 needs that many ranks"),
        (
            "data_parallel_shard_degree = 4\ntensor_parallel_degree = 4",
            4,
            "tp 4 × dp_shard 4 = 16 is not the 8 ranks of 2 nodes",
        ),
        ("data_parallel_replicate_degree = 3", 8, "dp_replicate 3 does not divide the 8 data-parallel ranks"),
        ("data_parallel_shard_degree = 0", 8, "0 is no degree"),
        ("data_parallel_replicate_degree = 8", 8, "8 replicas leave no ranks"),
    ],
)
def test_degrees_that_are_not_those_of_the_ranks(titan: Callable[[str], str], lines: str, gpus: int, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        resolve(asked(titan(lines), gpus=gpus))


def test_what_torchtitan_has_and_no_plan_is_named(titan: Callable[[str], str]) -> None:
    lines = "enable_async_tensor_parallel = true\n[compile]\nenable = true\n"
    lines += "[quantize.grouped_mm.float8]\nfqns = ['experts']\n"
    keys = keys_of(read_setup(titan(lines)))
    assert keys >= {"parallelism.enable_async_tensor_parallel", "compile.components"}
    assert "quantize.grouped_mm.float8.fqns" in keys


def test_torchtitans_experts_are_shared(titan: Callable[[str], str]) -> None:
    """A dense model has none, whatever the file says."""
    lines = "expert_parallel_degree = 4\nexpert_tensor_parallel_degree = 2\ntensor_parallel_degree = 2"
    dense = read_setup(titan(lines))
    assert "ep" not in dense.degrees
    assert "parallelism.expert_parallel_degree" in keys_of(dense)
    path = Path(titan(lines))
    path.write_text(path.read_text().replace('"llama3"', '"qwen3"').replace('"8B"', '"30B-A3B"'))
    request = asked(str(path), gpus=8)
    assert (request.model, request.ep, request.etp, request.tp, request.sp) == ("Qwen/Qwen3-30B-A3B", 4, 2, 2, True)
    assert {one.key for one in request.unmodelled} == {"model.name"}
    layout = resolve(request).cases[0].layout
    assert (layout.dp, layout.expert_shard_group) == (4, 1)
    path.write_text(path.read_text().replace("expert_tensor_parallel_degree = 2\n", ""))  # later versions have no such key
    later = resolve(asked(str(path), gpus=8)).cases[0].layout
    assert (later.etp, later.dp, later.expert_shard_group) == (1, 4, 2)


def test_a_torchtitan_command_line_brings_its_file(titan: Callable[[str], str], tmp_path: Any) -> None:
    """Flags by dotted names win over the file."""
    titan("tensor_parallel_degree = 2")
    script = tmp_path / "run.sh"
    flags = "--job.config_file run.toml --parallelism.tensor_parallel_degree 4 --training.seq_len 4096"
    script.write_text(f"torchrun --nproc_per_node=8 --nnodes=2 -m torchtitan.train {flags}\n")
    setup = read_setup(str(script))
    assert (setup.program, setup.value("gpus"), setup.value("nodes"), setup.degrees["tp"], setup.ask.seq_len) == (
        "torchtitan",
        8,
        2,
        4,
        4096,
    )


def test_torchtitans_words_of_other_years() -> None:
    old = read_setup({"training.batch_size": 2, "training.data_parallel_shard_degree": 4, "training.tensor_parallel_degree": 2})
    assert (old.ask.micro_batch, old.ask.dp_shard, old.value("gpus"), dict(old.degrees)) == (2, 4, 8, {"tp": 2, "sp": True})
    new = {"training.num_tokens_per_microbatch_per_dp_rank": 65536, "training.max_context_length": 8192}
    new |= {"parallelism.pipeline_parallel_degree": 2, "parallelism.num_pp_microbatches": 8}
    setup = read_setup(new)
    assert (setup.ask.micro_batch, setup.ask.seq_len, setup.ask.grad_accum) == (8, 8192, 8)


def test_axolotls_degrees(tmp_path: Any) -> None:
    """Ranks beyond both sizes are replicas; its tensor and context parallelism are others than ours."""

    def written(**keys: Any) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(dump_yaml(AXOLOTL | keys))
        return str(path)

    assert asked(written(dp_shard_size=4), gpus=8).dp_replicate == 2
    assert asked(written(dp_shard_size=8), gpus=8).dp_replicate == 1
    assert asked(written(dp_replicate_size=2), gpus=8).dp_replicate == 2
    for key in ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"):
        assert key in keys_of(read_setup(written(**{key: 2})))
        assert key not in keys_of(read_setup(written(**{key: 1})))
    with pytest.raises(BadInput, match="dp_replicate 2 × dp_shard 3 = 6 is not the 8 ranks"):
        asked(written(dp_shard_size=3), gpus=8)


def test_accelerates_degrees() -> None:
    """Its product has to be the number of processes, and replicas go with FSDP 2."""
    config = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}
    replicas = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    given = {"model": "meta-llama/Llama-3.2-1B", "seq_len": 64, "engine": "fsdp2"}
    request = asked(config | {"parallelism_config": replicas}, **given)
    assert (request.dp_replicate, request.gpus) == (2, 8)
    assert not [one for one in request.unmodelled if "replicate" in one.key]
    with pytest.raises(BadInput, match="dp_shard_size 4 × cp_size 3 is 12, and there are 8 processes"):
        read_setup(config | {"parallelism_config": {"dp_shard_size": 4, "cp_size": 3}})
    older = read_setup(config | {"fsdp_config": {}, "parallelism_config": replicas})
    assert "parallelism_config.parallelism_config_dp_replicate_size" in keys_of(older)


def test_a_script_on_megatron_that_is_not_its_own_is_refused_by_name(tmp_path: Any) -> None:
    script = tmp_path / "run.sh"
    flags = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --num-layers 32 --micro-batch-size 1 --bf16"
    script.write_text(f"torchrun --nproc_per_node 8 --nnodes 2 pretrain_vlm.py {flags}\n")
    with pytest.raises(BadInput, match=r"pretrain_vlm\.py trains by Megatron-LM in a way of its own"):
        read_setup(str(script))
