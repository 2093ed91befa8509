"""One configuration as files, in the form that each program reads, and what the program's command line takes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.documents import dump_yaml
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.writer import dump_ds_config
from zeroplan.interop.accelerate import accelerate_deepspeed, accelerate_fsdp2
from zeroplan.interop.hf_trainer import training_arguments
from zeroplan.interop.lightning import lightning_trainer


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a form is written of.

    Attributes:
        zero: sharding and offload.
        workload: batches, precision, optimizer.
        cluster: for the numbers of nodes and GPUs.
        ds_config: the explicit ds_config, for engines that take one.
        output: the path of the main file; other files go into its folder.
        launcher: one of :data:`zeroplan.interop.launch.LAUNCHERS`.
    """

    zero: ZeroConfig
    workload: Workload
    cluster: Cluster
    ds_config: Mapping[str, Any] | None
    output: str
    launcher: str

    def beside(self, name: str) -> str:
        """The path of a file in the main file's folder."""
        return os.path.join(os.path.dirname(self.output), name)


@dataclass(frozen=True, slots=True)
class FormFiles:
    """A form's files and how its program starts.

    Attributes:
        texts: by path; the main file first.
        launcher: the launcher that the form needs, or the one that was asked for.
        arguments: what the user's program gets on its command line.
        accelerate_config: the YAML file that ``accelerate launch`` reads.
    """

    texts: Mapping[str, str]
    launcher: str
    arguments: tuple[str, ...] = ()
    accelerate_config: str = "accelerate.yaml"


Form = Callable[[Configuration], FormFiles]


def explicit(one: Configuration) -> FormFiles:
    """A ds_config for ``deepspeed.initialize``: no ``auto``. With the launcher accelerate, its YAML beside it."""
    if one.launcher == "accelerate":
        return accelerate(one)
    return FormFiles({one.output: _ds_config(one)}, one.launcher, ("--deepspeed_config", one.output))


def accelerate(one: Configuration) -> FormFiles:
    """An explicit ds_config, and the YAML of ``accelerate launch`` that names it."""
    return _with_accelerate(one, {one.output: _ds_config(one)})


def trainer(one: Configuration) -> FormFiles:
    """A ds_config with ``auto`` where the HF Trainer fills it, and the TrainingArguments that do."""
    assert one.ds_config is not None
    config, said = training_arguments(one.ds_config, gradient_checkpointing=one.workload.gradient_checkpointing)
    texts = {one.output: dump_ds_config(config), one.beside("training_arguments.json"): _json(said)}
    if one.launcher == "accelerate":
        return _with_accelerate(one, texts)
    return FormFiles(texts, one.launcher, ("--deepspeed", one.output))


def lightning(one: Configuration) -> FormFiles:
    """A ds_config for ``DeepSpeedStrategy``, and the Trainer's arguments. Lightning's ranks start by torchrun."""
    assert one.ds_config is not None
    config, said = lightning_trainer(one.ds_config, gpus=one.cluster.gpus, nodes=one.cluster.nodes)
    return FormFiles({one.output: dump_ds_config(config), one.beside("trainer.json"): _json(said)}, "torchrun")


def fsdp2_by_accelerate(one: Configuration) -> FormFiles:
    """The YAML of ``accelerate launch`` that shards by FSDP2; batches are the program's own."""
    reshard = one.zero.stage == 3
    yaml = accelerate_fsdp2(one.workload, gpus=one.cluster.gpus, nodes=one.cluster.nodes, reshard=reshard)
    return FormFiles({one.output: dump_yaml(yaml)}, "accelerate", accelerate_config=one.output)


def _with_accelerate(one: Configuration, texts: dict[str, str]) -> FormFiles:
    beside = one.beside("accelerate.yaml")
    yaml = accelerate_deepspeed(one.zero, gpus=one.cluster.gpus, nodes=one.cluster.nodes, config_file=one.output)
    return FormFiles({**texts, beside: dump_yaml(yaml)}, "accelerate", accelerate_config=beside)


def _ds_config(one: Configuration) -> str:
    assert one.ds_config is not None
    return dump_ds_config(one.ds_config)


def _json(data: object) -> str:
    return json.dumps(data, indent=2) + "\n"
