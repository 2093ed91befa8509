"""One file, two programs: what DeepSpeed and zeroplan's runtime make of the same ds_config."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
from agreement_cases import random_config

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.ds_config.dialect import Dialect, Support
from zeroplan.ds_config.findings import Severity
from zeroplan.ds_config.reader import RULES, DsConfig, inspect_ds_config, read_ds_config
from zeroplan.ds_config.sections import SECTIONS
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def runtimes(config: dict[str, Any], **more: Any) -> DsConfig:
    return inspect_ds_config(config, dialect=Dialect.RUNTIME, **more)


def whats(config: DsConfig) -> list[str]:
    return [str(finding) for finding in config.of_severity(Severity.ERROR, Severity.OPEN)]


@pytest.mark.parametrize(
    ("config", "runtime_says", "deepspeed_says"),
    [
        ({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, ["not supported"], []),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, [], []),
        ({"zero_optimization": {"stage": 0, "cpu_offload": True}}, ["optimizer offload needs stage 1, 2 or 3"], []),
        ({"amp": {"enabled": True}}, ["was removed from DeepSpeed"], ["was removed from DeepSpeed"]),
        ({"amp": {"enabled": False}}, [], ["was removed from DeepSpeed"]),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, ["'torch_autocast' is not supported"], []),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, ["NVMe offload needs stage 3"], []),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            ["'auto' is for the HF Trainer"],
            ["rejected by DeepSpeed"],
        ),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, [], ["needs stage 3"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["both enabled"], ["both enabled"]),
        ({"gradient_clipping": -1}, ["-1 is not a number of zero or more"], []),
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, ["5000 is out of range"], []),
        ({"unheard_of": 1}, ["'unheard_of' is not supported"], []),
    ],
)
def test_who_refuses_what(config: dict[str, Any], runtime_says: list[str], deepspeed_says: list[str]) -> None:
    for found, said in (
        (whats(runtimes(config, world_size=1)), runtime_says),
        (whats(inspect_ds_config({"train_batch_size": 1, **config}, world_size=1)), deepspeed_says),
    ):
        assert len(found) == len(said), found
        assert all(part in text for part, text in zip(said, found, strict=True)), found


def test_a_refused_key_may_stand_at_its_default() -> None:
    zero = {"stage": 3, "zero_quantized_gradients": False, "zero_hpz_partition_size": 1, "zenflow": None, "cpu_offload": False}
    config = {"zero_optimization": zero, "torch_autocast": {"enabled": False}, "gradient_allreduce_op": "mean"}
    found = read_ds_config(config, dialect=Dialect.RUNTIME)
    assert len(found.ignored) == 5
    assert "torch_autocast" in found.ignored


def test_each_ignores_the_others_keys() -> None:
    config = {"train_batch_size": 8, "zeroplan": {"ring": 3}, "aio": {"thread_count": 3}, "comms_logger": {"enabled": True}}
    theirs = read_ds_config(config)
    assert [f.where for f in theirs.warnings if f.id == "key.ignored"] == ["zeroplan", "aio.thread_count"]
    assert (theirs.runtime_options.ring, theirs.zero.aio.intra_op_parallelism) == (2, 1)
    ours = read_ds_config(config, dialect=Dialect.RUNTIME)
    assert ours.ignored == ("comms_logger",)
    assert (ours.runtime_options.ring, ours.zero.aio.intra_op_parallelism) == (3, 3)


def test_coercion_is_the_same() -> None:
    config = {"bf16": {"enabled": "false"}, "fp16": {"enabled": 1}, "zero_optimization": {"stage": "2"}, "train_batch_size": 8}
    for dialect in Dialect:
        found = read_ds_config(config, dialect=dialect)
        assert (found.zero.stage, found.training.dtype) == (2, DType.FP16)


@pytest.mark.parametrize("dialect", Dialect)
def test_batch_arithmetic_is_the_same(dialect: Dialect) -> None:
    config = {"train_batch_size": 24, "gradient_accumulation_steps": 3}
    job = read_ds_config(config, dialect=dialect, world_size=4).training
    assert (job.micro_batch, job.grad_accum) == (2, 3)
    with pytest.raises(BadInput, match="24 does not divide by accumulation 3 × 5 ranks"):
        read_ds_config(config, dialect=dialect, world_size=5)


def test_an_open_size_is_the_trainers_for_deepspeed_and_absent_for_the_runtime() -> None:
    config = {"train_batch_size": 8, "gradient_accumulation_steps": "auto"}
    assert inspect_ds_config(config, world_size=2).training.micro_batch is None
    job = runtimes(config, world_size=2).training
    assert (job.micro_batch, job.grad_accum) == (4, 1)


def test_a_plan_refuses_what_the_runs_reader_refuses() -> None:
    """Seeded. The run reads by `inspect_ds_config`, the plan through a request; both verdicts occur."""
    verdicts = set()
    for seed in range(150):
        config = random_config(random.Random(seed))
        faults = runtimes(config, world_size=1).errors
        try:
            estimate_report(Ask(model=LLAMA, engine="zeroplan", ds_config=config, depth="formula", gpus=1))
            said = ""
        except BadInput as fault:
            said = fault.what
        if faults:
            assert said == faults[0].what
        verdicts.add(bool(faults))
    assert verdicts == {True, False}


def test_every_rule_holds_of_some_program_and_has_a_name_of_its_own() -> None:
    assert all(rule.dialects for rule in RULES)
    of_runtime = [rule for rule in RULES if Dialect.RUNTIME in rule.dialects]
    assert len({rule.id for rule in of_runtime}) == len(of_runtime)


def test_what_the_runtime_refuses_whole_has_no_key_that_it_honours() -> None:
    for path, section in SECTIONS.items():
        parent, _, name = path.rpartition(".")
        owner = SECTIONS[parent].find(name) if path else None
        if owner is not None and owner.runtime is Support.REFUSED:
            assert all(key.runtime is not Support.HONOURED for key in section.keys.values()), path


def test_hjson_is_read_where_the_package_is_there(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.hjson"
    path.write_text(
        '# no quotes\ntrain_batch_size: 8\nzero_optimization: {\n  stage: 2\n  offload_optimizer: {"device": "cpu"}\n}\n'
    )
    if importlib.util.find_spec("hjson") is None:
        with pytest.raises(BadInput, match="is not JSON"):
            inspect_ds_config(str(path))
        return
    for dialect in Dialect:
        found = inspect_ds_config(str(path), dialect=dialect, world_size=8)
        assert (found.training.train_batch, found.zero.stage, found.zero.offload_optimizer.device) == (8, 2, OffloadDevice.CPU)
    for text, says in [
        ("a: 1\na: 2\n", "a key stands twice"),
        ("", "is not JSON"),
        ("just words", "is not JSON"),
        ("a: " + "1" * 5000, "is not JSON"),
        ("[" * 9000, "nested deeper"),
    ]:
        path.write_text(text)
        with pytest.raises(BadInput, match=says):
            inspect_ds_config(str(path))
