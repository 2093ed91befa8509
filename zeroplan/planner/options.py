"""The keyword arguments of the Python API, typed, and the right name of one that does not exist.

Each public function takes one of these dicts by ``Unpack``, so that editors and type checkers know its arguments. They are
the fields of :class:`~zeroplan.run.ask.Ask` under the same names and types, which a test holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from zeroplan.core.errors import did_you_mean
from zeroplan.techniques.table import TABLE


class AdapterArguments(TypedDict, total=False):
    """Adapters, and the base beside them."""

    lora_rank: int | None
    lora_targets: Sequence[str]
    base_dtype: str | None
    quantize: str | None


class MeshArguments(TypedDict, total=False):
    """Degrees of parallelism that a search over layouts takes, too."""

    tp: int
    sp: bool
    cp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    schedule: str
    dp_replicate: int


class PassArguments(TypedDict, total=False):
    """What passes beside plain samples of one length, and what is done between steps: no loop of verify does these."""

    adapter_dtype: str | None
    freeze: Sequence[str]
    images: int
    image_size: int | None
    video_frames: int
    audio_seconds: int
    lengths: str | Sequence[int] | None
    eval_batch: int | None
    eval_logits: int
    save: str | None
    save_by: str | None
    save_only_model: bool


class HardwareArguments(TypedDict, total=False):
    """The cards, the host and the network that are described, and how a model that is not at hand is counted."""

    params: int | None
    from_scratch: bool
    gpu: str | None
    vram: str | int | None
    cpu_ram: str | int | None
    nvme: str | int | None
    host: str | None
    network: str | None
    depth: str | None


class RunOptions(AdapterArguments, total=False):
    """A run that is started here: the model's source, the workload, and how it is sharded."""

    token: str | None
    trust_remote_code: bool
    offline: bool | None
    task: str | None
    micro_batch: int | None
    seq_len: int | None
    source_len: int | None
    target_len: int | None
    grad_accum: int | None
    dtype: str | None
    optimizer: str | None
    attn: str
    labelled_share: float | None
    engine: str
    deepspeed_version: str | None
    transformers_version: str | None
    offload_optimizer: str | None
    offload_param: str | None


class MachineOptions(RunOptions, PassArguments, HardwareArguments, total=False):
    """A run on a machine that is described: as above, and its cluster."""

    largest_layer_params: int | None
    gpus: int
    nodes: int
    alloc_conf: str


class StageOptions(MachineOptions, MeshArguments, total=False):
    """Arguments of ``estimate_zero1_mem`` and its siblings, whose name says the stage."""

    gradient_checkpointing: bool
    checkpoint_policy: str
    set_to_none: bool
    fp8: str | None
    reduce_dtype: str | None
    tiled_mlp: int
    tiled_loss: int
    offload_checkpoints: bool
    compile: str | None
    zero_init: bool | None
    ulysses: int
    partition: str | None
    dp_replicate: int


class EstimateOptions(StageOptions, total=False):
    """Arguments of ``estimate``; `inputs` is an example batch for a live module: its forward's keyword arguments."""

    inputs: Any
    stage: int | None
    ds_config: str | Path | dict[str, Any] | None
    files: Sequence[Any]
    program: str | None


class VerifyOptions(RunOptions, MeshArguments, total=False):
    """Arguments of ``verify``: `gpus` is the number of ranks, None for all GPUs, or on a CPU two, or what the degrees need."""

    gpus: int | None
    stage: int | None
    ds_config: str | Path | dict[str, Any] | None
    gradient_checkpointing: bool
    compile: str | None
    ulysses: int
    partition: str | None
    files: Sequence[Any]
    program: str | None


class TuneOptions(RunOptions, total=False):
    """Arguments of ``tune``: `gpus` is the number of ranks, None for all; `stage` and the like fix what else is searched."""

    gpus: int | None
    stage: int | None
    gradient_checkpointing: bool | None
    compile: str | None


#: Arguments and options by the names that other programs give them: our name, and what else to say of it.
OTHER_NAMES = {
    "batch_size": ("micro_batch", " (samples a GPU and pass), or recommend's global batch"),
    "per_device_train_batch_size": ("micro_batch", ""),
    "train_micro_batch_size_per_gpu": ("micro_batch", ""),
    "gradient_accumulation_steps": ("grad_accum", ""),
    "per_device_eval_batch_size": ("eval_batch", ""),
    "eval_batch_size": ("eval_batch", " (samples a GPU and pass of an evaluation)"),
    "eval_accumulation_steps": ("eval_logits", " (batches whose logits stay on the GPU)"),
    "save_strategy": ("save", " (sharded or full)"),
    "fsdp_state_dict_type": ("save", " (sharded or full)"),
    "state_dict_type": ("save", " (sharded or full)"),
    "max_seq_length": ("seq_len", ""),
    "sequence_parallel_size": ("ulysses", " (ranks that share each sample's tokens)"),
    "sp_size": ("ulysses", " (ranks that share each sample's tokens)"),
    "max_length": ("seq_len", ""),
    "max_source_length": ("source_len", ""),
    "max_target_length": ("target_len", ""),
    "context_length": ("seq_len", ""),
    "ctx": ("seq_len", ""),
    "batch": ("micro_batch", ""),
    "sequence_length": ("seq_len", ""),
    "num_gpus": ("gpus", " (of one node)"),
    "num_gpus_per_node": ("gpus", ""),
    "nproc_per_node": ("gpus", " (of one node)"),
    "num_nodes": ("nodes", ""),
    "nnodes": ("nodes", ""),
    "gpu_memory": ("vram", ""),
    "ram": ("cpu_ram", ""),
    "zero_stage": ("stage", ""),
    "zero": ("stage", ""),
    "deepspeed": ("ds_config", ""),
    "precision": ("dtype", ""),
    "optim": ("optimizer", ""),
    "attn_implementation": ("attn", ""),
    "lora": ("lora_rank", ""),
    "lora_r": ("lora_rank", ""),
    "target_modules": ("lora_targets", ""),
    "activation_checkpointing": ("gradient_checkpointing", ""),
    "grad_checkpointing": ("gradient_checkpointing", ""),
    "checkpointing": ("gradient_checkpointing", ""),
}


def require_known(given: Mapping[str, Any], known: Iterable[str], function: str) -> None:
    """Refuse a keyword argument that `function` does not take. Raises TypeError: with the right name, or the nearest ones."""
    verb = function if function in ("recommend", "scale", "verify", "tune") else "estimate"
    declared = (option for technique in TABLE for option in technique.options)
    known = sorted({*known, *(option.name for option in declared if option.taken_by(verb))})
    for name in given:
        if name in known:
            continue
        ours, more = OTHER_NAMES.get(name.lower(), ("", ""))
        near = f"write {ours}{more}" if ours in known else did_you_mean(name, known) or f"it takes {', '.join(known)}"
        raise TypeError(f"{function}() takes no argument {name!r}; {near}")
