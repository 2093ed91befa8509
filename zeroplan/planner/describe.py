"""A workload and a cluster as plain values, as every report's JSON shows them."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.techniques.table import TABLE

if TYPE_CHECKING:
    from zeroplan.interop.setups import Setup

#: Fields of a workload's parts that every report shows; others where they are not as usual.
_ALWAYS = ("micro_batch", "seq_len", "grad_accum", "dtype", "precision", "optimizer", "optimizer_kind", "attn", "from_scratch")
_USUAL = Workload()


def describe_workload(workload: Workload) -> dict[str, Any]:
    """Return the workload as the report's JSON shows it; what no run has unless it asks for it stands only where it does."""
    told: dict[str, Any] = {}
    for part in ("batch", "numerics", "loop", "objective"):
        mine, usual = getattr(workload, part), getattr(_USUAL, part)
        for field in fields(mine):
            value = getattr(mine, field.name)
            if field.name in _ALWAYS or value != getattr(usual, field.name):
                told[field.name] = str(value) if isinstance(value, str) else value
    told.pop("dynamic_padding", None)  # it decides no figure, but whether one at the limit of its card is a promise
    for technique in TABLE:
        found = technique.of(workload)
        told |= technique.off if found is None else technique.described(found)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}


def describe_cluster(cluster: Cluster, layout: ParallelLayout | None = None) -> dict[str, Any]:
    """The cluster as the report's JSON shows it; sizes are bytes. `layout` is None for data parallelism alone."""
    return {
        "nodes": cluster.nodes,
        "gpus": cluster.gpus,
        "ranks": cluster.layout.world_size,
        "gpu": cluster.gpu.name,
        "vram": cluster.vram,
        "usable_vram": cluster.usable_vram,
        "cpu_ram": cluster.cpu_ram,
        "usable_cpu_ram": cluster.usable_cpu_ram,
        "cpu_ram_assumed": cluster.assumes_host,
        "host": cluster.host.name,
        "nvme": cluster.nvme,
        **({} if cluster.free_vram is None else {"held": cluster.held}),
        **({} if layout is None else {"layout": describe_layout(layout)}),
    }


def describe_layout(layout: ParallelLayout) -> dict[str, Any]:
    """Return the degrees of a layout, and the groups that follow, as the report's JSON shows them."""
    degrees = {"dp": layout.dp, "tp": layout.tp, "sp": layout.sp, "cp": layout.cp, "pp": layout.pp, "vpp": layout.vpp}
    if layout.ep > 1:
        degrees |= {"ep": layout.ep, "etp": layout.etp, "expert_shard_group": layout.expert_shard_group}
    if layout.ulysses > 1:
        degrees |= {"ulysses": layout.ulysses}
    if layout.dp_replicate > 1:
        degrees |= {"dp_replicate": layout.dp_replicate}
    return degrees | {"shard_group": layout.shard_group}


def describe_setup(setup: Setup) -> dict[str, Any]:
    """Return the run that files describe, as the report's JSON shows it."""
    return {
        "program": setup.program,
        "title": setup.title,
        "files": list(setup.files),
        "method": setup.method,
        "task": setup.task,
        "assumed": list(setup.assumed),
        "unknown_keys": list(setup.unknown),
        "says": setup.line,
    }
