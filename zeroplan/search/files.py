"""A recommendation's files, in the form of the program that runs it, and the command that starts it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.ds_config.writer import dump_ds_config
from zeroplan.interop.accelerate import accelerate_deepspeed, accelerate_fsdp2
from zeroplan.interop.documents import dump_yaml
from zeroplan.interop.hf_trainer import training_arguments
from zeroplan.interop.launch import LAUNCHERS, Launch, launch
from zeroplan.interop.lightning import lightning_trainer
from zeroplan.search.answer import Recommendation

FORMS = ("explicit", "trainer", "lightning", "accelerate", "accelerate-fsdp2")
#: The forms that each engine reads. DDP has no file: micro batch and accumulation are its program's own arguments.
_READ_BY = {"deepspeed": FORMS[:4], "fsdp2": FORMS[4:], "zeroplan": FORMS[:1], "ddp": ()}


@dataclass(frozen=True, slots=True)
class Files:
    """Texts by path, the first being the main one, and how to start the program with them."""

    texts: dict[str, str]
    start: Launch


def files_of(
    one: Recommendation, cluster: Cluster, output: str, *, form: str = "explicit", launcher: str | None = None, script: str
) -> Files:
    """The files to write beside `output` (which is the main one), and the command.

    Args:
        one: the configuration.
        cluster: for numbers of nodes and GPUs.
        output: the path of the main file; others go into its folder.
        form: one of :data:`FORMS`. `trainer` and `lightning` write the arguments that belong to the config beside it.
        launcher: one of :data:`zeroplan.interop.launch.LAUNCHERS`; None for the engine's own.
        script: the user's program.

    Raises:
        BadInput: an unknown form or launcher, or a form that the engine does not have.
    """
    require_form(form, one.plan.engine, launcher)
    launcher = launcher or ("torchrun" if one.plan.engine == "zeroplan" else "deepspeed")
    folder = os.path.dirname(output)
    beside = os.path.join(folder, "accelerate.yaml")
    arguments: list[str] = []
    if form == "accelerate-fsdp2":
        reshard = one.zero.stage == 3
        texts = {output: dump_yaml(accelerate_fsdp2(one.workload, gpus=cluster.gpus, nodes=cluster.nodes, reshard=reshard))}
        beside, launcher = output, "accelerate"
    else:
        config = one.ds_config()
        texts = {output: dump_ds_config(config)}
        arguments = (
            ["--deepspeed", output] if form == "trainer" else ["--deepspeed_config", output] if form == "explicit" else []
        )
        if form == "trainer":
            shape, said = training_arguments(config, gradient_checkpointing=one.workload.gradient_checkpointing)
            texts = {output: dump_ds_config(shape), os.path.join(folder, "training_arguments.json"): _json(said)}
        elif form == "lightning":
            shape, said = lightning_trainer(config, gpus=cluster.gpus, nodes=cluster.nodes)
            texts = {output: dump_ds_config(shape), os.path.join(folder, "trainer.json"): _json(said)}
            launcher = "torchrun"
        if form == "accelerate" or launcher == "accelerate":
            yaml = accelerate_deepspeed(one.zero, gpus=cluster.gpus, nodes=cluster.nodes, config_file=output)
            texts[beside] = dump_yaml(yaml)
            launcher, arguments = "accelerate", []
    start = launch(
        launcher,
        gpus=cluster.gpus,
        nodes=cluster.nodes,
        script=script,
        arguments=arguments,
        alloc_conf=one.alloc_conf,
        accelerate_config=beside,
    )
    for name, text in start.files.items():
        texts[os.path.join(folder, name)] = text
    return Files(texts, start)


def require_form(form: str, engine: str, launcher: str | None) -> None:
    """Refuse a form that `engine` does not read, before any search.

    Raises:
        BadInput: that, or an unknown name.
    """
    if form not in FORMS:
        raise BadInput(f"unknown form {form[:40]!r}", where="--form", remedy=f"use one of {', '.join(FORMS)}")
    if launcher is not None and launcher not in LAUNCHERS:
        remedy = f"use one of {', '.join(LAUNCHERS)}"
        raise BadInput(f"unknown launcher {launcher[:40]!r}", where="--launcher", remedy=remedy)
    known = _READ_BY[engine]
    if not known:
        raise BadInput(f"{engine} reads no file", where="--output", remedy="give your program the micro batch of the table")
    if form not in known:
        remedy = f"use --form {known[0]}" if len(known) == 1 else "use --engine fsdp2 with it"
        raise BadInput(f"{form} is not for {engine}", where="--form", remedy=remedy)
    if engine == "zeroplan" and launcher in ("deepspeed", "accelerate"):
        raise BadInput(f"{launcher} does not start the runtime", where="--launcher", remedy="use torchrun or slurm")


def _json(data: object) -> str:
    return json.dumps(data, indent=2) + "\n"
