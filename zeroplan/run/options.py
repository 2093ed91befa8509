"""The options that no technique declares: what Python, flags, the page and readers of files call them, and their defaults.

The order is that of the help. An option without help has no flag: Python alone has it, or readers of files and the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroplan.core.lit_model import LitModel
from zeroplan.core.option import CLUSTER, FILES, RUNS, SEARCHES, SHARDING, WORK, Option
from zeroplan.core.sizes import parse_count, parse_tokens
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.workload import OptimizerKind, Precision

#: The engine of ``estimate``, ``explain`` and ``recommend`` unless the user names another.
DEFAULT_ENGINE = "deepspeed"
_NOT_SEARCHED = (*SEARCHES, *RUNS)


def _count(text: str, where: str) -> int:
    return parse_count(text, where=where)


def _tokens(text: str, where: str) -> int:
    return parse_tokens(text, where=where)


def _paths(paths: Sequence[str], where: str) -> tuple[str, ...]:
    return tuple(paths)


class ModelOptions:
    """Options that name the model, and how it is found and read."""

    __slots__ = ()
    model = Option[Any](
        object,
        None,
        "A hub id, a folder, a config.json, a safetensors file or index.",
        flag="",
        metavar="MODEL",
        complete="models",
        text=str,
        without=("check",),
        page=True,
        wins=True,
        merges=False,
    )
    params = Option[int | None](
        int,
        None,
        "A bare count instead of MODEL: 7.5B.",
        metavar="COUNT",
        read=_count,
        text=str,
        without=(*RUNS, "doctor"),
        page=True,
        wins=True,
    )
    task = Option[str | None](
        str,
        None,
        "The head: causal-lm, sequence-classification, …; or the training: sft, dpo, kto, orpo, … [by the config, or the file]",
        metavar="TASK",
        page=True,
        wins=True,
    )
    largest_layer_params = Option[int | None](int, None)
    offline = Option[bool | None](bool, None)
    inputs = Option[Any](object, None)
    recorded = Option[Any](object, None)


class WorkloadOptions:
    """How it is trained, on one rank."""

    __slots__ = ()
    micro_batch = Option[int | None](int, None, "Samples a GPU and pass. [1]", WORK, least=1, found=True, page=True)
    seq_len = Option[int | None](
        int,
        None,
        "Tokens a sample: 4096 or 4k. [2048, or the model's most]",
        WORK,
        metavar="TOKENS",
        read=_tokens,
        text=str,
        least=1,
        page=True,
    )
    source_len = Option[int | None](
        int,
        None,
        "Tokens of an encoder-decoder's source, where the target has others.",
        WORK,
        metavar="TOKENS",
        read=_tokens,
        text=str,
        least=1,
    )
    target_len = Option[int | None](
        int, None, "Tokens of its target. [--seq-len]", WORK, metavar="TOKENS", read=_tokens, text=str, least=1
    )
    grad_accum = Option[int | None](int, None, "Passes a step. [1]", WORK, least=1, found=True, page=True)
    dtype = Option[str | None](str, None, "bf16, fp16 or fp32. [bf16]", WORK, page=True)
    optimizer = Option[str | None](str, None, "adamw, lion, sgd, … [adamw]", WORK, complete="optimizers", page=True)
    attn = Option(str, "sdpa", "sdpa, flash or eager. [sdpa]", WORK, page=True, wins=True)


class ClusterOptions:
    """On what it runs, and what a host loads first."""

    __slots__ = ()
    from_scratch = Option(bool, False, "Weights are initialised: no host reads pretrained ones.", WORK, without=RUNS, page=True)
    gpus = Option(int, 1, "GPUs a node. [1, or as the file says]", CLUSTER, page=True, wins=True, merges=False)
    nodes = Option(
        int, 1, "Nodes. [1, or as the file says]", CLUSTER, without=("scale", *RUNS), page=True, wins=True, merges=False
    )
    gpu = Option[str | None](
        str,
        None,
        "A preset, with a count if you like: H100, 4xA100-80G, …; local: the GPU of this machine, with what is free of it.",
        CLUSTER,
        complete="gpus",
        without=RUNS,
        page=True,
    )
    vram = Option[str | int | None](
        object, None, "Memory of one GPU: 24G, or 24 (GiB).", CLUSTER, text=str, without=RUNS, page=True
    )
    cpu_ram = Option[str | int | None](
        object, None, "Memory of one node's host: 256G.", CLUSTER, text=str, without=RUNS, page=True
    )
    nvme = Option[str | int | None](object, None, "Disk of one node: 2T.", CLUSTER, text=str, without=RUNS, page=True)
    network = Option[str | None](
        str, None, "Between nodes: 8x400G, 25G, 4x100G:efa, aws-p5, … [as usual for the GPU]", CLUSTER, without=RUNS
    )
    host = Option[str | None](
        str, None, "server or desktop: what its system keeps of --cpu-ram. [by the GPU]", CLUSTER, without=RUNS, page=True
    )


class ShardingOptions:
    """Who shards it and how, and the files that say so."""

    __slots__ = ()
    engine = Option(
        str, DEFAULT_ENGINE, "{engines}, or one of your own. [{default}]", SHARDING, complete="engines", page=True, merges=False
    )
    deepspeed_version = Option[str | None](
        str,
        None,
        "The DeepSpeed that runs: 0.14.2, a file that says it, or installed. [by --from's project, else 0.19.8]",
        SHARDING,
        metavar="VERSION",
        wins=True,
        merges=False,
    )
    stage = Option[int | None](int, None, "0 to 3. [all]", SHARDING, without=("check",), found=True)
    offload_optimizer = Option[str | None](str, None, "none, cpu or nvme. [all]", SHARDING, without=("check",), found=True)
    offload_param = Option[str | None](str, None, "none, cpu or nvme. [all]", SHARDING, without=("check",), found=True)
    zero_init = Option[bool | None](
        bool,
        None,
        "Stage 3 builds the model sharded. [yes, or as --from says]",
        SHARDING,
        flag="--zero-init/--no-zero-init",
        without=("check", *_NOT_SEARCHED),
        page=True,
        wins=True,
    )
    ds_config = Option[str | Path | dict[str, Any] | None](
        object, None, "A ds_config.json: exactly one plan.", SHARDING, text=str, without=("check", *SEARCHES), merges=False
    )
    files = Option[Sequence[Any]](
        object,
        (),
        "What a program's files say: recipes, TrainingArguments, accelerate, … Repeats.",
        FILES,
        flag="--from",
        text=list[str],
        read=_paths,
        without=SEARCHES,
        found=True,
    )
    program = Option[str | None](
        str, None, "The program that owns the file, where two could.", FILES, without=SEARCHES, found=True, page=True
    )
    depth = Option[str | None](
        str, None, "formula or simulated. [simulated where a tape is at hand]", without=RUNS, found=True, page=True
    )
    alloc_conf = Option(str, "", "PYTORCH_ALLOC_CONF: expandable_segments:True,…", without=RUNS, page=True, merges=False)
    token = Option[str | None](str, None, "The hub's token, for gated models.", without=("doctor",), found=True)
    trust_remote_code = Option(bool, False, "Let an unknown architecture run its own code.", without=("doctor",))


class ProgramOptions:
    """What only readers of programs' files say, and what the planner finds out from a live module.

    Attributes:
        model_dtype: of the base model's weights as they are loaded; DeepSpeed casts them.
        autocast: whether 16-bit arithmetic is autocast's; else the model itself is in 16 bits.
        precision: the division of dtypes where no ds_config says it.
        optimizer_kind: how the optimizer walks its tensors.
        torch_adam: whether the optimizer is a class of torch's where DeepSpeed would build one of its own.
        whole_embedding_states: whether an 8-bit optimizer keeps the embeddings' states in fp32.
        accelerate_units: whether accelerate applies ``fully_shard``, with units of its own for embedding, norm and head.
        one_unit: whether FSDP wraps the model as a whole.
        mixed_units: whether FSDP 1 wraps blocks with the adapters in them.
        fsdp_version: 1 where FSDP is the older one.
        dp_shard: data-parallel ranks that shard, where the program asks that all degrees together are the ranks.
        replicates: whether ranks beyond `dp_shard` are replicas; else the program refuses them.
        global_batch: samples a step of all ranks together, where accumulation follows from it.
        detached_loss: whether the loop keeps the loss without its graph, as the Trainer's does.
        own_loop: whether the loop is the script's own, and no Trainer's, whatever it keeps of its loss.
        head: the task whose head the model has, where it is not the one of its own checkpoint.
        moved: whether the model is made on the host and then moved to its GPU.
        lit_model: the model of LitGPT's own code that the run trains.
        described_by_files: whether files describe the run.
        unmodelled: keys that no option holds.
    """

    __slots__ = ()
    model_dtype = Option[str | None](str, None, merges=False)
    autocast = Option(bool, True, merges=False)
    precision = Option[Precision | None](Precision, None)
    optimizer_kind = Option[OptimizerKind | None](OptimizerKind, None)
    torch_adam = Option(bool, False)
    whole_embedding_states = Option(bool, False)
    accelerate_units = Option(bool, False)
    one_unit = Option(bool, False, merges=False)
    mixed_units = Option(bool, False)
    fsdp_version = Option[int | None](int, None, merges=False)
    dp_shard = Option[int | None](int, None, merges=False)
    replicates = Option(bool, False, merges=False)
    global_batch = Option[int | None](int, None, merges=False)
    detached_loss = Option(bool, False)
    own_loop = Option(bool, False)
    head = Option[str | None](str, None, merges=False)
    moved = Option(bool, False)
    lit_model = Option[LitModel | None](object, None, merges=False)
    described_by_files = Option(bool, False)
    unmodelled = Option[tuple[Unmodelled, ...]](object, ())
