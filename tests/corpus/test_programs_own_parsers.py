"""The corpus, held against the parsers of programs that are installed: transformers', accelerate's and DeepSpeed's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.test_corpus import laid_out, name_of, rows
from zeroplan.core.optimizers import known_optimizer
from zeroplan.core.plumbing.documents import dump_yaml
from zeroplan.interop.programs.known import names_in
from zeroplan.interop.readers import read_setup

__all__ = ["laid_out"]
pytestmark = pytest.mark.torch
#: Programs whose recipes hold TrainingArguments beside their own.
ON_THE_TRAINER = ("trl", "llama-factory")


def test_the_list_of_arguments_is_that_of_the_installed_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    fields = set(transformers.TrainingArguments.__dataclass_fields__) | set(
        transformers.Seq2SeqTrainingArguments.__dataclass_fields__
    )
    ours = names_in("hf-trainer")
    assert {name for name in fields if not name.startswith("_")} - ours == set()


@pytest.mark.parametrize("program", ON_THE_TRAINER)
def test_the_trainers_own_parser_reads_the_same(program: str, tmp_path: Path) -> None:
    """``HfArgumentParser`` on each recipe's TrainingArguments, with the program's own defaults where it overrides them."""
    transformers = pytest.importorskip("transformers")
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser(TrainingArguments)
    own = {"trl": {"gradient_checkpointing": True}, "llama-factory": {}}[program]
    compared = 0
    for row in rows(program):
        if "refused" in row["expected"]:
            continue
        said = {key: value for key, value in row["keys"].items() if key in TrainingArguments.__dataclass_fields__}
        for key in (
            "deepspeed",
            "fsdp",
            "fsdp_config",
            "report_to",
            "eval_strategy",
            "load_best_model_at_end",
            "hub_strategy",
            "push_to_hub",
            "do_eval",
            "lr_scheduler_kwargs",
            "log_level",
            "torch_compile",
            "tf32",  # asked of a GPU
        ):
            said.pop(key, None)
        half = {key: said.pop(key, None) for key in ("bf16", "fp16")}  # asked of a GPU, which is not here
        said = {**own, **{key: value for key, value in said.items() if value is not None}}
        (arguments,) = parser.parse_dict({**said, "output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"})
        setup = read_setup(row["keys"] if "deepspeed" not in row["keys"] else {**row["keys"], "deepspeed": None}, program)
        assert setup.ask.micro_batch == arguments.per_device_train_batch_size, name_of(row)
        assert setup.ask.grad_accum == arguments.gradient_accumulation_steps, name_of(row)
        if program == "trl":
            assert setup.value("gradient_checkpointing") is arguments.gradient_checkpointing, name_of(row)
        if not {"optim", "use_muon"} & {one.key for one in setup.unmodelled} and not row["keys"].get("use_muon"):
            assert setup.ask.optimizer == known_optimizer(str(arguments.optim.value)), name_of(row)
        if half["bf16"] or half["fp16"]:
            assert setup.ask.dtype == ("bf16" if half["bf16"] else "fp16"), name_of(row)
        compared += 1
    assert compared >= 25
    assert transformers.__version__


def test_accelerates_own_loader_reads_the_same(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    compared = 0
    for row in rows("accelerate"):
        if "refused" in row["expected"]:
            continue
        path = tmp_path / "accelerate.yaml"
        path.write_text(dump_yaml(row["keys"]))
        try:
            loaded: Any = load_config_from_file(str(path))
        except ValueError:  # keys of another version
            continue
        block = {**(row["keys"].get("deepspeed_config") or {}), "deepspeed_config_file": None}
        setup = read_setup({**row["keys"], "deepspeed_config": block})
        kinds = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp2"}
        assert setup.value("engine") == kinds.get(str(loaded.distributed_type).rpartition(".")[2], "ddp"), name_of(row)
        if setup.value("gpus") is not None and loaded.num_processes > 0:
            assert setup.value("gpus") * (setup.value("nodes") or 1) == loaded.num_processes, name_of(row)
        compared += 1
    assert compared >= 20


def test_deepspeeds_own_parser_reads_the_same() -> None:
    """``DeepSpeedConfig`` on each ds_config, with ``auto`` filled as the Trainer fills it."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    compared = 0
    for row in rows("ds_config"):
        config = filled(copy.deepcopy(row["keys"]))
        try:
            parsed = DeepSpeedConfig(config)
        except Exception:  # what it refuses is test_agreement's business
            continue
        assert parsed.zero_config.stage == row["expected"]["zero_stage"], name_of(row)
        offload = parsed.zero_config.offload_optimizer
        assert ("none" if offload is None else str(getattr(offload.device, "value", offload.device))) == row["expected"][
            "offload"
        ], name_of(row)
        compared += 1
    assert compared >= 20


def filled(value: Any, key: str = "") -> Any:
    """The same without ``auto``: batches and accumulation are 1, other keys go."""
    if isinstance(value, dict):
        found = {name: filled(inner, name) for name, inner in value.items()}
        return {name: inner for name, inner in found.items() if inner != "auto"}
    return 1 if value == "auto" and key.endswith(("batch_size", "_per_gpu", "accumulation_steps")) else value
