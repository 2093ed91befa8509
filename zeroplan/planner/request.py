"""A Request: what a user asks for, by flags or arguments, before anything is checked or looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroplan.core.generation import Colocated, Generation
from zeroplan.core.ppo import Rollout
from zeroplan.core.preferences import PairLoss
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.workload import OptimizerKind, Precision, Reference
from zeroplan.engines.registry import DEFAULT_ENGINE


@dataclass(frozen=True, slots=True)
class Request:
    """A user's request. None leaves a field open: to the default, or to what the ds_config says."""

    model: Any = None
    params: int | None = None
    largest_layer_params: int | None = None
    token: str | None = None
    trust_remote_code: bool = False
    offline: bool | None = None
    task: str | None = None
    inputs: Any = None
    # workload
    micro_batch: int | None = None
    seq_len: int | None = None
    source_len: int | None = None
    target_len: int | None = None
    grad_accum: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    gradient_checkpointing: bool = False
    checkpoint_policy: str = "full"
    attn: str = "sdpa"
    lora_rank: int | None = None
    lora_targets: Sequence[str] = ()
    quantize: str | None = None
    transformers_version: str | None = None
    reentrant: bool | None = None
    quantized_by: str = "--quantize"
    set_to_none: bool = True
    fp8: str | None = None
    tiled_mlp: int = 0
    tiled_loss: int = 0
    offload_checkpoints: bool = False
    compile: str | None = None
    adapter_dtype: str | None = None
    whole_base: bool = False
    images: int = 0
    image_size: int | None = None
    labelled_share: float | None = None
    lengths: str | Sequence[int] | None = None
    eval_batch: int | None = None
    eval_logits: int = 0
    save: str | None = None
    save_by: str | None = None
    save_only_model: bool = False
    from_scratch: bool = False
    # cluster
    gpus: int = 1
    nodes: int = 1
    gpu: str | None = None
    vram: str | int | None = None
    cpu_ram: str | int | None = None
    nvme: str | int | None = None
    host: str | None = None
    network: str | None = None
    # parallelism beside data's, which is what these leave of the ranks
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ulysses: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    schedule: str = "1f1b"
    partition: str | None = None
    dp_replicate: int = 1
    # sharding
    engine: str = DEFAULT_ENGINE
    deepspeed_version: str | None = None
    stage: int | None = None
    offload_optimizer: str | None = None
    offload_param: str | None = None
    zero_init: bool | None = None
    ds_config: str | Path | dict[str, Any] | None = None
    depth: str | None = None
    alloc_conf: str = ""
    # other programs' files, which fill the fields above and these
    files: Sequence[Any] = ()
    program: str | None = None
    precision: Precision | None = None
    optimizer_kind: OptimizerKind | None = None
    torch_adam: bool = False
    chunked_head: bool = False
    lora_dropout: bool = False
    detached_loss: bool = False
    whole_embedding_states: bool = False
    accelerate_units: bool = False
    reduce_dtype: str | None = None
    one_unit: bool = False
    mixed_units: bool = False
    longest_first: bool = False
    built: bool = False  # the live module came with its adapters and quantised layers from a program's reader
    pads: bool = False
    told_by_file: bool = False
    ones: tuple[str, ...] = ()  # fields whose default was asked for outright, so that no file and no search says otherwise
    pairs: bool = False
    reference: Reference | None = None
    kl_batch: bool = False
    pair_loss: PairLoss | None = None
    generation: Generation | None = None
    colocated: Colocated | None = None
    rollout: Rollout | None = None
    moved: bool = False
    unmodelled: tuple[Unmodelled, ...] = ()
