"""Every form with every launcher, over stages, offloads, dtypes, checkpointing, adapters and nodes: each command is parsed
by its launcher's own parser, and what it hands over by its program's.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workloads import flat_workload, with_flat
from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Engine
from zeroplan.engines.registry import find_engine
from zeroplan.interop.forms.configuration import Model
from zeroplan.search.files import Files, Target, files_of

pytestmark = pytest.mark.torch
GPUS = 4
MODEL = Model("meta-llama/Llama-3.2-1B", "AutoModelForCausalLM")


@dataclass(frozen=True)
class Start:
    """One configuration and how it is started."""

    engine: Engine
    form: str
    launcher: str
    nodes: int
    zero: ZeroConfig
    workload: Workload
    new_script: bool

    @property
    def label(self) -> str:
        work = self.workload
        lora = "lora" if work.lora_rank else "full"
        return f"{self.engine.name} {self.form} {self.launcher} x{self.nodes} {self.zero.label} {work.numerics.dtype} {lora}"


def starts(form: str, engine: Engine) -> Iterator[Start]:
    """The same 120 of all combinations each time: with every launcher, and one and two nodes."""
    cluster = Cluster.of(gpus=GPUS, vram="80G", cpu_ram="512G", nvme="2T")
    space = engine.search_space(cluster, "/nvme")
    zeros = list(dict.fromkeys(zero.but(reduce_bucket_size=500_000_000) for zero, _ in space))
    both, found = (False, True), engine.forms()[form]
    every = list(product(zeros, DType, found.launchers, (1, 2), both, (None, 8), both))
    for zero, dtype, launcher, nodes, again, rank, new in Random(13).sample(every, min(120, len(every))):
        base = flat_workload(
            micro_batch=2, seq_len=512, grad_accum=4, dtype=dtype, gradient_checkpointing=again, lora_rank=rank
        )
        work = with_flat(base, precision=engine.precision(dtype))
        yield Start(engine, form, launcher, nodes, zero, work, new or not found.main)


def files_for(start: Start) -> Files:
    """Write the configuration's files into the current folder."""
    cluster = Cluster.of(gpus=GPUS, nodes=start.nodes, vram="80G", cpu_ram="512G", nvme="2T")
    config = start.engine.ds_config(start.zero, start.workload, cluster.layout)
    one: Any = SimpleNamespace(
        engine=start.engine,
        zero=start.zero,
        workload=start.workload,
        alloc_conf="expandable_segments:True",
        ds_config=lambda: config,
    )
    target = Target("run/", start.form, start.launcher, "train.py", "new.py" if start.new_script else None, ())
    Path("run").mkdir(exist_ok=True)
    files = files_of(one, cluster, target, MODEL)
    for path, text in files.texts.items():
        Path(path).write_text(text)
    return files


def handed_over(start: Start, files: Files) -> list[str]:
    """Parse the command as its launcher does; returns what the program gets."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from deepspeed.launcher.runner import parse_args as deepspeed_args
    from torch.distributed.run import parse_args as torchrun_args

    command, ranks = files.start.command, GPUS * start.nodes
    if start.launcher == "slurm":
        text = files.texts["run/train.sbatch"]
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
        assert f"--nodes={start.nodes}\n" in text
        assert "export PYTORCH_ALLOC_CONF=expandable_segments:True\n" in text
        command = text.replace("\\\n", " ").splitlines()[-1].replace('"$HEAD', '"head').replace('"$SLURM_JOB_ID"', "7")
        command = command.removeprefix("srun ").replace(
            """bash -c 'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' accelerate""",
            "accelerate launch --machine_rank 0",
        )
    else:
        assert start.nodes > 1 or "PYTORCH_ALLOC_CONF=expandable_segments:True " in files.start.shell()
    words = shlex.split(command.replace("${NODE_RANK:?}", "0"))
    if words[0] == "deepspeed":
        read = deepspeed_args(words[1:])
        assert (max(read.num_nodes, 1), read.num_gpus) == (start.nodes, GPUS)
        script, arguments = read.user_script, read.user_args
    elif words[0] == "torchrun":
        read = torchrun_args(words[1:])
        assert (str(read.nnodes).split(":")[-1], str(read.nproc_per_node)) == (str(start.nodes), str(GPUS))
        script, arguments = read.training_script, read.training_script_args
    else:
        read, *_ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        assert (read.num_machines, read.num_processes) == (start.nodes, ranks)
        script, arguments = read.training_script, read.training_script_args
    assert script == ("new.py" if start.new_script else "train.py")
    return list(arguments)


def check_program(start: Start, files: Files, arguments: list[str]) -> None:
    """Parse what the program gets as the program does, and compare it with the plan."""
    work, zero = start.workload, start.zero
    if start.form in ("trainer", "trl"):
        check_trainer(start, arguments)
    elif start.form == "explicit":
        assert arguments == ["--deepspeed_config", "run/ds_config.json"]
    else:
        assert arguments == []
    if start.form in ("explicit", "accelerate"):
        config = json.loads(Path("run/ds_config.json").read_text())
        assert "auto" not in json.dumps(config)
        assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 4)
        assert config["train_batch_size"] == 8 * GPUS * start.nodes
        assert config["zero_optimization"]["stage"] == zero.stage
        enabled = {name: config.get(name, {}).get("enabled", False) for name in ("bf16", "fp16")}
        assert enabled == {"bf16": work.numerics.dtype is DType.BF16, "fp16": work.numerics.dtype is DType.FP16}
        offloads = {
            name: config["zero_optimization"].get(f"offload_{name}", {}).get("device", "none")
            for name in ("optimizer", "param")
        }
        assert offloads == {"optimizer": zero.offload_optimizer.device, "param": zero.offload_param.device}
    if work.lora_rank is not None:
        assert json.loads(Path("run/adapter_config.json").read_text())["r"] == work.lora_rank
    if start.new_script:
        text = Path("new.py").read_text()
        compile(text, "new.py", "exec")
        assert "SEQ_LEN = 512\n" in text
        assert start.form in ("explicit", "trainer", "trl", "lightning") or "batch" in text.lower()
    else:
        said = " ".join(files.program_must)
        assert "512 tokens" in said
        assert work.lora_rank is None or start.form == "trl" or "get_peft_model" in said


def check_trainer(start: Start, arguments: list[str]) -> None:
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    work = start.workload
    if start.form == "trl":
        trl = pytest.importorskip("trl")
        kinds: list[Any] = [trl.SFTConfig] if start.new_script else [trl.SFTConfig, trl.ModelConfig]
    else:
        kinds = [TrainingArguments]
    parser = HfArgumentParser(kinds)
    try:
        if start.new_script:
            (path,) = arguments
            read, *others = parser.parse_json_file(path)
        else:
            read, *others = parser.parse_args_into_dataclasses(arguments)
        config = read.hf_deepspeed_config.config
    finally:
        unset_hf_deepspeed_config()
    assert (read.per_device_train_batch_size, read.gradient_accumulation_steps) == (2, 4)
    assert (read.bf16, read.fp16) == (work.numerics.dtype is DType.BF16, work.numerics.dtype is DType.FP16)
    assert read.gradient_checkpointing is work.gradient_checkpointing
    assert config["zero_optimization"]["stage"] == start.zero.stage
    if others:
        assert (others[0].use_peft, others[0].lora_r if others[0].use_peft else None) == (
            work.lora_rank is not None,
            work.lora_rank,
        )


@pytest.fixture
def two_nodes_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TrainingArguments refuses 16 bits without a GPU; other ranks are there, one is this."""
    for package in ("deepspeed", "accelerate", "transformers"):
        pytest.importorskip(package)
    from transformers import TrainingArguments, training_args

    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(TrainingArguments, "world_size", GPUS)
    monkeypatch.setattr(TrainingArguments, "_setup_devices", SimpleNamespace(type="cuda", index=0))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(name)


FORMS = [
    *(("deepspeed", form) for form in ("explicit", "trainer", "trl", "lightning", "accelerate")),
    *(("fsdp2", form) for form in ("torch", "accelerate-fsdp2")),
    ("ddp", "torch"),
    ("zeroplan", "explicit"),
]


@pytest.mark.parametrize(("engine", "form"), FORMS)
def test_every_printed_command_starts_what_was_planned(two_nodes_of_gpus: None, engine: str, form: str) -> None:
    found = find_engine(engine)
    assert list(found.forms()) == [name for other, name in FORMS if other == engine]
    seen = set()
    for start in starts(form, found):
        files = files_for(start)
        try:
            check_program(start, files, handed_over(start, files))
        except AssertionError as error:
            raise AssertionError(f"{start.label}: {error}") from error
        seen.add((start.launcher, start.nodes))
    assert seen == set(product(found.forms()[form].launchers, (1, 2)))
