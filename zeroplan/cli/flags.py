"""The flags that several verbs share, each described once, and how they become a Request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer

from zeroplan.core.units import parse_count
from zeroplan.planner.request import Request

Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A hub id, a folder, a config.json, a safetensors file or index.")
]
Params = Annotated[str | None, typer.Option("--params", metavar="COUNT", help="A bare count instead of MODEL: 7.5B.")]

_WORK = "Workload"
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", rich_help_panel=_WORK, help="Samples a GPU and pass. [1]")]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", rich_help_panel=_WORK, help="Tokens a sample. [2048, or the model's most]")
]
GradAccum = Annotated[int | None, typer.Option("--grad-accum", rich_help_panel=_WORK, help="Passes a step. [1]")]
Dtype = Annotated[str | None, typer.Option("--dtype", rich_help_panel=_WORK, help="bf16, fp16 or fp32. [bf16]")]
OptimizerName = Annotated[str | None, typer.Option("--optimizer", rich_help_panel=_WORK, help="adamw, lion, sgd, … [adamw]")]
Checkpointing = Annotated[
    bool, typer.Option("--gradient-checkpointing/--no-gradient-checkpointing", rich_help_panel=_WORK, help="Recompute blocks.")
]
Attn = Annotated[str, typer.Option("--attn", rich_help_panel=_WORK, help="sdpa, flash or eager.")]
LoraRank = Annotated[
    int | None, typer.Option("--lora-rank", rich_help_panel=_WORK, help="Train LoRA adapters of this rank only.")
]
LoraTargets = Annotated[
    str | None, typer.Option("--lora-targets", rich_help_panel=_WORK, help="Layers to adapt, by comma. [all linear layers]")
]

_CLUSTER = "Cluster"
Gpus = Annotated[int, typer.Option("--gpus", rich_help_panel=_CLUSTER, help="GPUs a node.")]
Nodes = Annotated[int, typer.Option("--nodes", rich_help_panel=_CLUSTER, help="Nodes.")]
GpuName = Annotated[str | None, typer.Option("--gpu", rich_help_panel=_CLUSTER, help="A preset: H100, A100-80G, RTX4090, …")]
Vram = Annotated[str | None, typer.Option("--vram", rich_help_panel=_CLUSTER, help="Memory of one GPU: 24G.")]
CpuRam = Annotated[str | None, typer.Option("--cpu-ram", rich_help_panel=_CLUSTER, help="Memory of one node's host: 256G.")]
Nvme = Annotated[str | None, typer.Option("--nvme", rich_help_panel=_CLUSTER, help="Disk of one node: 2T.")]

_ZERO = "Sharding"
EngineName = Annotated[str, typer.Option("--engine", rich_help_panel=_ZERO, help="deepspeed, fsdp2, ddp or zeroplan.")]
Stage = Annotated[int | None, typer.Option("--stage", rich_help_panel=_ZERO, help="0 to 3. [all]")]
OffloadOptimizer = Annotated[
    str | None, typer.Option("--offload-optimizer", rich_help_panel=_ZERO, help="none, cpu or nvme. [all]")
]
OffloadParam = Annotated[str | None, typer.Option("--offload-param", rich_help_panel=_ZERO, help="none, cpu or nvme. [all]")]
DsConfig = Annotated[str | None, typer.Option("--ds-config", rich_help_panel=_ZERO, help="A ds_config.json: exactly one plan.")]

Depth = Annotated[str | None, typer.Option("--depth", help="formula or simulated. [simulated where a tape is at hand]")]
AllocConf = Annotated[str, typer.Option("--alloc-conf", help="PYTORCH_ALLOC_CONF: expandable_segments:True,…")]
Token = Annotated[str | None, typer.Option("--token", help="The hub's token, for gated models.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let an unknown architecture run its own code.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_REQUEST_FIELDS = frozenset(f.name for f in fields(Request))


def request(values: Mapping[str, Any]) -> Request:
    """A Request from a verb's parameters; the parameters that are not a request's are left out.

    Raises:
        BadInput: a malformed count.
    """
    chosen = {name: value for name, value in values.items() if name in _REQUEST_FIELDS}
    if isinstance(chosen.get("params"), str):
        chosen["params"] = parse_count(chosen["params"], where="--params")
    chosen["lora_targets"] = names(chosen.get("lora_targets"))
    return Request(**chosen)


def names(text: str | None) -> tuple[str, ...]:
    """The names in a list by comma."""
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()
