"""A workload and a cluster as plain values, as every report's JSON shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.curriculum import CURRICULUM_LEARNING
from zeroplan.core.evaluation import Evaluation
from zeroplan.core.generation import Colocated, Generation
from zeroplan.core.layer_drop import LAYER_DROP
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.quantize_training import QUANTIZE_TRAINING
from zeroplan.core.saving import Saving
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.core.workload import Workload

if TYPE_CHECKING:
    from zeroplan.interop.setups import Setup

_ASKED_FOR = {
    "quantize": None,
    "set_to_none": True,
    "chunked_head": False,
    "lora_dropout": False,
    "detached_loss": False,
    "adapter_dtype": None,
    "whole_base": False,
    "whole_embedding_states": False,
    "accelerate_units": False,
    "one_unit": False,
    "mixed_units": False,
    "longest_first": False,
    "linear_experts": False,
    "base_on_host": False,
    "reentrant": False,
    "pairs": False,
    "reference": None,
    "kl_batch": False,
    "pair_loss": None,
    "wide_logits": False,
    "images": 0,
    "image_size": None,
    "labelled_share": None,
    "evaluation": None,
    "generation": None,
    "colocated": None,
    "moved": False,
    "saving": None,
    "lengths": (),
    "target_len": None,
    "fp8": None,
    "tiled_mlp": 0,
    "tiled_loss": 0,
    "offload_checkpoints": False,
    "checkpoint_interval": 1,
    "sparse_attention": None,
    "curriculum": None,
    "layer_drop": None,
    "quantize_training": None,
    "local_steps": 0,
    "compile": None,
    "reduce_dtype": None,
    "torch_adam": False,
    "decays": False,
}


#: What no search models, in time or memory: the key that asks for it, and why. A plan of it has no search to go on to.
UNSEARCHED = {
    "sparse_attention": ("sparse_attention", "the time that block-sparse attention takes is in no figure"),
    "curriculum": (
        CURRICULUM_LEARNING,
        "what is reserved as the sequences of a curriculum grow is in no figure, nor is the time of the shorter steps",
    ),
    "local_steps": ("local_step_clipper", "the time of local steps is in no figure"),
    "quantize_training": (QUANTIZE_TRAINING, "the time that rounding the weights takes is in no figure"),
    "layer_drop": (LAYER_DROP, "the time of steps with fewer layers is in no figure, nor is what is reserved as layers differ"),
}

#: What decides no figure, but whether one at the limit of its card is a promise.
_UNTOLD = ("pads", "quantized_by")


def describe_workload(workload: Workload) -> dict[str, Any]:
    """Return the workload as the report's JSON shows it; what no run has unless it asks for it stands only where it does."""
    named = [name for name in Workload.__dataclass_fields__ if name not in _UNTOLD]
    shown = [name for name in named if name not in _ASKED_FOR or getattr(workload, name) != _ASKED_FOR[name]]
    told = {name: _plain(getattr(workload, name)) for name in shown}
    if workload.lengths:
        told["lengths"] = {"mean": sum(workload.lengths) / len(workload.lengths), "max": max(workload.lengths)}
    return told


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
        "host": cluster.host.name,
        "nvme": cluster.nvme,
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


def _plain(value: Any) -> Any:
    if isinstance(value, Evaluation):
        return {"batch": value.batch, "kept": value.kept}
    if isinstance(value, Generation):
        return {"prompt": value.prompt, "completion": value.completion}
    if isinstance(value, Colocated):
        return {"share": value.share, "sleeps": value.sleeps}
    if isinstance(value, Saving):
        return {"state_dict": value.state_dict.value, "saver": value.saver.value, "optimizer": value.optimizer}
    if isinstance(value, SparseAttention):
        return value.as_section()
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, str) else value
