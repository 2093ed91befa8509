"""The job that verify and tune start holds every field of the workload that was planned, or is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.validate.small import CONFIG
from tests.workloads import with_flat
from zeroplan.core.curriculum import Curriculum
from zeroplan.core.errors import BadInput
from zeroplan.core.evaluation import Evaluation
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.generation import Colocated, Generation
from zeroplan.core.layer_drop import ProgressiveLayerDrop
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.preferences import PairLoss
from zeroplan.core.quantization import Quantization
from zeroplan.core.saving import Saving, StateDict
from zeroplan.core.workload import (
    Attention,
    Compilation,
    DType,
    GradientCheckpointing,
    Lora,
    Media,
    QuantizedBase,
    Reference,
    Workload,
)
from zeroplan.engines.registry import find_engine
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.techniques.table import TABLE
from zeroplan.validate.job import VerifyJob, job_of

Cli = Callable[..., tuple[int, str, str]]
#: A value of each field that is not its default. Those of fields that a job does not hold are refused.
OTHERS: dict[str, Any] = {
    "micro_batch": 3,
    "seq_len": 96,
    "grad_accum": 2,
    "dtype": DType.FP32,
    "optimizer": "lion",
    "attn": Attention.EAGER,
    "gradient_checkpointing": True,
    "lora_rank": 4,
    "lora_targets": ("q_proj",),
    "labelled_share": 0.5,
    "target_len": 64,
    "compile": Compilation.BLOCKS,
    "reentrant": True,
    "checkpoint_policy": "every:2",
    "quantize": Quantization.NF4,
    "media": Media(images=1),
    "evaluation": Evaluation(2, 0, casts=True),
    "saving": Saving(StateDict.FULL),
    "lengths": (8, 16),
    "fp8": Float8Recipe.ROWWISE,
    "tiled_mlp": 2,
    "tiled_loss": 2,
    "reference": Reference.MODEL,
    "pair_loss": next(iter(PairLoss)),
    "curriculum": object.__new__(Curriculum),
    "layer_drop": object.__new__(ProgressiveLayerDrop),
    "generation": object.__new__(Generation),
    "colocated": object.__new__(Colocated),
    "reduce_dtype": DType.BF16,
}
#: Fields that the ds_config of the run, which the engine writes from the case, decides again on each rank, and how quickly
#: weights come, which no plan of a run with random weights reads.
BY_CONFIG = {
    *("precision", "optimizer_kind", "torch_adam", "decays", "checkpoint_interval", "sparse_attention"),
    *("quantize_training", "local_steps", "from_scratch"),
}
#: What a field is a part of.
PARTS: dict[str, dict[str, Any]] = {
    **{key: {"gradient_checkpointing": True} for key in ("reentrant", "checkpoint_policy", "offload_checkpoints")},
    **{key: {"lora_rank": 4} for key in ("lora_targets", "lora_dropout")},
}
PARTS_FIELDS = tuple(
    one.name for part in ("batch", "numerics", "loop", "objective") for one in fields(getattr(Workload(), part))
)
OF_TECHNIQUES = ("gradient_checkpointing", "reentrant", "checkpoint_policy", "offload_checkpoints", "lora_rank", "lora_targets")
OF_TECHNIQUES += ("lora_dropout", "quantize", "chunked_head", "evaluation", "saving", "fp8", "tiled_mlp", "tiled_loss")
OF_TECHNIQUES += ("curriculum", "layer_drop", "generation", "colocated", "compile")
NAMES = (*PARTS_FIELDS, *OF_TECHNIQUES)
#: What the job holds; everything else is refused.
HELD = {
    *("micro_batch", "seq_len", "grad_accum", "dtype", "optimizer", "attn", "gradient_checkpointing", "lora_rank"),
    *("lora_targets", "labelled_share", "target_len", "compile", "reentrant"),
}


def changed(base: Workload, name: str) -> Workload:
    """Return the workload with another value of one field."""
    value = OTHERS.get(name, not base.leaf(name) if name in PARTS_FIELDS else True)
    return with_flat(base, **PARTS.get(name, {}), **{name: value})


def test_every_technique_has_a_field_here() -> None:
    """Whatever options make the workload carry; values of a technique's own file have tests of their own."""
    tried = {type(one) for name in OF_TECHNIQUES for one in changed(Workload(), name).techniques}
    made = {technique.kind for technique in TABLE if "value" in vars(type(technique))}
    made.discard(bool)  # a version of transformers is checked there, and carried by no workload
    assert not {kind for kind in made - tried if not kind.__module__.startswith("zeroplan.techniques")}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_CONFIG])
def test_a_field_reaches_the_job_or_is_refused(name: str) -> None:
    resolved = resolve(Ask(model=CONFIG, engine="ddp", gpus=2))
    (case,) = resolved.cases
    other = changed(case.workload, name)
    assert other != case.workload
    case = replace(case, workload=other)
    if name not in HELD:
        with pytest.raises(BadInput) as caught:
            job_of(case, resolved.engine)
        assert caught.value.where
        return
    job = job_of(case, resolved.engine)
    assert VerifyJob.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert job.workload == other


def test_a_job_crosses_to_another_process_with_every_field() -> None:
    """Whatever a workload and a job hold, each field by itself and each technique."""
    layout = ParallelLayout(gpus=8, tp=2, pp=2)
    work = Workload()
    made = {"generation": Generation(8, 8), "colocated": Colocated(0.5)}
    for name in NAMES:
        if name in made:
            work = with_flat(work, **{name: made[name]})
        elif name not in ("curriculum", "layer_drop", *BY_CONFIG):
            work = changed(work, name)
    assert {type(one) for one in work.techniques} >= {Lora, GradientCheckpointing, QuantizedBase, Evaluation, Generation}
    job = VerifyJob("x", "a:B", 3, {"n": [1]}, "Auto", work, 2, 3.5, layout, "gpipe", "uniform", {"bf16": {"enabled": True}})
    read = VerifyJob.from_json(json.loads(json.dumps(job.to_json())))
    assert read == job
    for one in fields(VerifyJob):
        assert getattr(read, one.name) == getattr(job, one.name), one.name


@pytest.mark.parametrize("verb", ["verify", "tune"])
@pytest.mark.parametrize(
    "words", [("--images", "1"), ("--no-set-to-none",), ("--fp8", "rowwise"), ("--tiled-mlp", "2")], ids=str
)
def test_what_the_loop_does_not_do_is_no_option(verb: str, words: tuple[str, ...], tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code, _, error = cli(verb, str(tmp_path), *words)
    assert (code, error.count("\n")) == (2, 1), error
    assert words[0] in error


@pytest.mark.torch
@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("--engine", "deepspeed", "--stage", "2", "--deepspeed-version", "0.9.0"), "--deepspeed-version"),
        (("--engine", "fsdp2", "--gradient-checkpointing", "--transformers-version", "4.40.0"), "--transformers-version"),
    ],
)
def test_another_version_than_the_installed_one_is_refused(
    words: tuple[str, ...], where: str, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code, _, error = cli("verify", str(tmp_path), *words)
    assert (code, error.count("\n")) == (2, 1), error
    assert where in error
    assert "is installed here and would run" in error


@pytest.mark.torch
def test_the_installed_deepspeed_is_the_one_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroplan.validate import api

    monkeypatch.setattr(api, "version", lambda package: "0.14.2+local")
    request = api.at_installed(Ask(model=CONFIG, engine="deepspeed", stage=2))
    assert request.deepspeed_version == "0.14.2"
    assert api.at_installed(Ask(model=CONFIG, engine="fsdp2")).deepspeed_version is None
    assert find_engine("deepspeed").package == "deepspeed"
