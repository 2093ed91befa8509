"""A workload and a cluster as plain values, as every report's JSON shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.curriculum import CURRICULUM_LEARNING, Curriculum
from zeroplan.core.evaluation import Evaluation
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.generation import Colocated, Generation
from zeroplan.core.layer_drop import LAYER_DROP, ProgressiveLayerDrop
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.quantize_training import QUANTIZE_TRAINING, QuantizeTraining
from zeroplan.core.saving import Saving
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.core.workload import (
    CheckpointPolicy,
    ChunkedHead,
    GradientCheckpointing,
    Lora,
    QuantizedBase,
    TiledLoss,
    TiledMlp,
    Workload,
)
from zeroplan.techniques.table import techniques_of

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


def describe_workload(workload: Workload) -> dict[str, Any]:
    """Return the workload as the report's JSON shows it; what no run has unless it asks for it stands only where it does."""
    values = values_of(workload)
    told = {name: _plain(value) for name, value in values.items() if name not in _ASKED_FOR or value != _ASKED_FOR[name]}
    del told["pads"]  # it decides no figure, but whether one at the limit of its card is a promise
    for technique, value in techniques_of(workload):
        told |= technique.described(value)
    lengths = workload.batch.lengths
    if lengths:
        told["lengths"] = {"mean": sum(lengths) / len(lengths), "max": max(lengths)}
    return told


def values_of(workload: Workload) -> dict[str, Any]:
    """Return what is on and how, each by a flat name, in the order in which reports show it."""
    batch, numerics, loop, objective = workload.batch, workload.numerics, workload.loop, workload.objective
    lora, base, again = workload.technique(Lora), workload.technique(QuantizedBase), workload.technique(GradientCheckpointing)
    tiled_mlp, tiled_loss = workload.technique(TiledMlp), workload.technique(TiledLoss)
    return {
        "micro_batch": batch.micro_batch,
        "seq_len": batch.seq_len,
        "grad_accum": batch.grad_accum,
        "dtype": numerics.dtype,
        "precision": numerics.precision,
        "optimizer": numerics.optimizer,
        "optimizer_kind": numerics.optimizer_kind,
        "torch_adam": numerics.torch_adam,
        "decays": numerics.decays,
        "attn": numerics.attn,
        "gradient_checkpointing": again is not None,
        "lora_rank": None if lora is None else lora.rank,
        "lora_targets": () if lora is None else lora.targets,
        "checkpoint_policy": str(CheckpointPolicy() if again is None else again.policy),
        "from_scratch": loop.from_scratch,
        "quantize": workload.quantize,
        "set_to_none": loop.set_to_none,
        "chunked_head": workload.has(ChunkedHead),
        "lora_dropout": lora is not None and lora.dropout,
        "detached_loss": loop.detached_loss,
        "adapter_dtype": None if base is None else base.adapter_dtype,
        "whole_base": base is not None and base.whole,
        "whole_embedding_states": numerics.whole_embedding_states,
        "accelerate_units": loop.accelerate_units,
        "one_unit": loop.one_unit,
        "pairs": batch.pairs,
        "reference": objective.reference,
        "kl_batch": objective.kl_batch,
        "pair_loss": objective.pair_loss,
        "wide_logits": objective.wide_logits,
        "images": batch.images,
        "image_size": batch.image_size,
        "labelled_share": batch.labelled_share,
        "evaluation": workload.technique(Evaluation),
        "saving": workload.technique(Saving),
        "lengths": batch.lengths,
        "pads": batch.pads,
        "target_len": batch.target_len,
        "fp8": workload.technique(Float8Recipe),
        "tiled_mlp": 0 if tiled_mlp is None else tiled_mlp.tiles,
        "tiled_loss": 0 if tiled_loss is None else tiled_loss.tiles,
        "offload_checkpoints": workload.checkpoints_on_host,
        "checkpoint_interval": 1 if again is None else again.interval,
        "sparse_attention": workload.technique(SparseAttention),
        "curriculum": workload.technique(Curriculum),
        "layer_drop": workload.technique(ProgressiveLayerDrop),
        "quantize_training": workload.technique(QuantizeTraining),
        "local_steps": numerics.local_steps,
        "compile": workload.compile,
        "generation": workload.technique(Generation),
        "colocated": workload.technique(Colocated),
        "moved": loop.moved,
        "mixed_units": loop.mixed_units,
        "longest_first": batch.longest_first,
        "linear_experts": base is not None and base.linear_experts,
        "base_on_host": base is not None and base.on_host,
        "reentrant": workload.reentrant,
        "reduce_dtype": numerics.reduce_dtype,
    }


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
