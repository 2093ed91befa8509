"""A request with ``--from``: files decide, flags fill what they leave open, and a contradiction is bad input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.preferences import PairLoss
from zeroplan.core.quantization import Quantization
from zeroplan.core.tasks import training_of
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Attention, CheckpointPolicy, DType, OptimizerKind, Precision, Reference
from zeroplan.engines.registry import DEFAULT_ENGINE, find_engine
from zeroplan.interop.readers import read_setups
from zeroplan.interop.setups import Setup
from zeroplan.run.ask import OPTIONS, Ask
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.techniques.compiled import COMPILED
from zeroplan.techniques.float8 import FLOAT8
from zeroplan.techniques.quantized_base import QUANTIZED_BASE
from zeroplan.techniques.reduced_gradients import REDUCED_GRADIENTS

#: Fields of a Setup that a Ask has too and whose value None means that nothing was said; with their flags.
_FIELDS = {
    "micro_batch": "--micro-batch",
    "grad_accum": "--grad-accum",
    "seq_len": "--seq-len",
    "target_len": "--target-len",
    "dtype": "--dtype",
    "optimizer": "--optimizer",
    "lora_rank": "--lora-rank",
    "eval_batch": "--eval-batch",
    "stage": "--stage",
    "offload_optimizer": "--offload-optimizer",
    "offload_param": "--offload-param",
}


def with_files(request: Ask) -> tuple[Ask, Setup]:
    """Read the request's files; returns the request that they fill, and what they say.

    The model, the number of GPUs and of nodes on the command line win over the files': the question may be of another
    machine, or of a copy of the model.

    Raises:
        BadInput: files that cannot be read or that a flag contradicts.
    """
    setup = told_of_machine(read_setups(request.files, request.program, training_of(request.task)), request)
    return _with_layout(filled(request, setup), setup), setup


def told_of_machine(setup: Setup, request: Ask) -> Setup:
    """Return the setup, among whose assumptions stands what flags say of the machine in place of its files."""
    machine = Cluster.of(gpus=request.gpus, nodes=request.nodes, gpu=request.gpu)
    said = []
    for field in ("gpus", "nodes"):
        theirs, ours = getattr(setup, field), getattr(machine, field)
        if theirs not in (None, ours) and (ours != 1 or field in request):
            what = "GPUs a node" if field == "gpus" else "nodes"
            said.append(f"{ours} {what} by the flags, where {setup.keys.get(field, field)} makes it {theirs}")
    return replace(setup, assumed=(*setup.assumed, *said))


def _with_layout(request: Ask, setup: Setup) -> Ask:
    """Return the request with the setup's degrees, whose keys then no longer stand among what is left out.

    Raises:
        BadInput: a flag that contradicts the setup, or degrees that are not those of the ranks.
    """
    for name, said in setup.degrees.items():
        asked = getattr(request, name)
        if asked not in (OPTIONS[name].default, said):
            raise BadInput(
                f"{setup.files[0]} says {said} ({setup.keys[name]}), the flag {asked}",
                where=f"--{name.replace('_', '-')}",
                remedy="change one of the two",
            )
    planned = {setup.keys[name] for name in (*setup.degrees, *(("dp_shard",) if setup.replicates else ()))}
    left_out = tuple(one for one in request.unmodelled if one.key not in planned)
    changed = request.replace(**setup.degrees, unmodelled=left_out)
    if setup.dp_shard is not None and setup.replicates:
        changed = changed.replace(dp_replicate=_ranks(changed) // setup.dp_shard or 1)
    _require_ranks(changed, setup)
    return _with_global_batch(changed, setup)


def _require_ranks(request: Ask, setup: Setup) -> None:
    """Hold the setup's degrees against the ranks, as programs do that are told all of them.

    Raises:
        BadInput: naming the product that the ranks are not, or that the number of GPUs is missing.
    """
    degrees = {name: getattr(request, name) for name in ("dp_replicate", "cp", "ulysses", "tp", "pp")}
    if setup.dp_shard is not None:
        degrees["dp_shard"] = setup.dp_shard
    product = math.prod(degrees.values())
    ranks = _ranks(request)
    if ranks == 1 < product and setup.gpus is None:
        raise BadInput(
            f"{_factors(degrees)} needs that many ranks, and nothing says how many there are",
            where=setup.files[0],
            remedy="give --gpus and --nodes",
        )
    if setup.dp_shard is not None and product != ranks:
        raise BadInput(
            f"{_factors(degrees)} is not the {ranks} ranks of {request.nodes} nodes",
            where=f"{setup.files[0]}: {setup.keys['dp_shard']}",
            remedy=f"change --gpus and --nodes, or the degrees to a product of {ranks}",
        )


def _factors(degrees: Mapping[str, int]) -> str:
    said = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "1"
    return f"{said} = {math.prod(degrees.values())}" if " × " in said else said


def _ranks(request: Ask) -> int:
    return Cluster.of(gpus=request.gpus, nodes=request.nodes, gpu=request.gpu).layout.world_size


def _with_global_batch(request: Ask, setup: Setup) -> Ask:
    """Return the request with the accumulation that the setup's global batch leaves on the ranks.

    Raises:
        BadInput: a global batch that data-parallel ranks and micro batch do not divide.
    """
    if setup.global_batch is None or request.grad_accum is not None:
        return request
    data_parallel = max(1, _ranks(request) // (request.tp * request.cp * request.ulysses * request.pp))
    micro = request.micro_batch or 1
    if setup.global_batch % (data_parallel * micro):
        raise BadInput(
            f"{data_parallel} data-parallel ranks × {micro} samples do not divide the global batch of {setup.global_batch}",
            where=f"{setup.files[0]}: {setup.keys['global_batch']}",
            remedy=f"use a multiple of {data_parallel * micro}",
        )
    return request.replace(grad_accum=setup.global_batch // (data_parallel * micro))


def filled(request: Ask, setup: Setup) -> Ask:
    """Return the request filled with a setup's values; degrees of parallelism stay among what is left out.

    Raises:
        BadInput: a flag that contradicts the setup.
    """
    name = setup.files[0] if setup.files else setup.program
    if training_of(request.task) is not None:
        request = request.replace(task=None)  # it has named the run, not the head
    changes: dict[str, Any] = {"unmodelled": (*request.unmodelled, *setup.unmodelled)}
    for field, flag in _FIELDS.items():
        said, asked = getattr(setup, field), getattr(request, field)
        if said is None:
            continue
        if asked is not None and _plain(field, asked) != said:
            key = setup.keys.get(field, field)
            raise BadInput(f"{name} says {said} ({key}), the flag {asked}", where=flag, remedy="change one of the two")
        changes[field] = said
    if setup.model is not None and request.model is None and request.params is None:
        changes["model"] = setup.model
    machine = Cluster.of(gpus=request.gpus, nodes=request.nodes, gpu=request.gpu)  # --gpu may hold the count
    for field in ("gpus", "nodes"):
        if getattr(setup, field) is not None and getattr(machine, field) == 1 and field not in request:
            changes[field] = getattr(setup, field)
    if setup.engine is not None and not _reads_ds_config_itself(request, setup):
        changes["engine"] = setup.engine
    if setup.fsdp_version == 1 and setup.offload_param is None:
        mine = setup.keys.get("engine")
        left_out = [one for one in setup.unmodelled if one.key != mine or one.effect is not Effect.UNKNOWN]
        changes |= {"engine": "fsdp", "unmodelled": (*request.unmodelled, *left_out)}
    if setup.attn is not None and request.attn == Attention.SDPA:
        changes["attn"] = setup.attn
    if setup.lora_targets and not request.lora_targets:
        changes["lora_targets"] = setup.lora_targets
    if setup.gradient_checkpointing is not None:
        if request.gradient_checkpointing and not setup.gradient_checkpointing:
            key = setup.keys.get("gradient_checkpointing", "gradient_checkpointing")
            raise BadInput(f"{name} says false ({key})", where="--gradient-checkpointing", remedy="change one of the two")
        changes["gradient_checkpointing"] = setup.gradient_checkpointing
        if setup.checkpoint_policy is not None and request.checkpoint_policy == "full":
            changes["checkpoint_policy"] = setup.checkpoint_policy
    if setup.reentrant is not None:
        changes["reentrant"] = setup.reentrant
    if setup.optimizer_kind is not None:
        changes |= {"optimizer_kind": OptimizerKind(setup.optimizer_kind), "torch_adam": True}
    changes["precision"] = _precision(setup)
    changes["chunked_head"] = setup.chunked_head
    for field in ("whole_embedding_states", "accelerate_units", "one_unit"):
        changes[field] = getattr(setup, field)
    if setup.reduce_dtype is not None and REDUCED_GRADIENTS.taken_by(find_engine(changes.get("engine", request.engine))):
        own = changes.get("dtype", request.dtype) or "bf16"
        changes["reduce_dtype"] = request.reduce_dtype or (own if setup.reduce_dtype == "products" else setup.reduce_dtype)
    if setup.lora_rank is not None:
        changes["one_unit"] = False  # peft's policy takes the place of every other
    changes |= {"lora_dropout": setup.lora_dropout, "detached_loss": setup.detached_loss}
    if setup.deepspeed_version is not None and changes.get("engine", request.engine) == DEFAULT_ENGINE:
        changes["deepspeed_version"] = request.deepspeed_version or setup.deepspeed_version
    if setup.labelled_share is not None and request.labelled_share is None:
        changes["labelled_share"] = setup.labelled_share
    changes |= {"generation": setup.generation, "colocated": setup.colocated, "moved": setup.moved}
    changes["pads"] = setup.pads and request.lengths is None
    if setup.saves:
        changes |= _saving(request, setup)
    if setup.head is not None and request.task is None and request.params is None:
        changes["task"] = setup.head
    if setup.pairs or setup.reference is not None or setup.kl_batch:
        changes |= _pairs(setup, changes["unmodelled"])
    if setup.quantize is not None:
        changes |= _quantized(setup, changes.get("engine", request.engine), changes["unmodelled"])
    if setup.fp8 is not None and request.fp8 is None:
        changes |= _float8(setup, changes.get("engine", request.engine), changes["unmodelled"])
    if setup.compile is not None and request.compile is None:
        changes |= _compiled(setup, changes.get("engine", request.engine), changes["unmodelled"])
    if setup.zero_init is not None and request.zero_init is None:
        changes["zero_init"] = setup.zero_init
    if setup.ds_config is not None:
        changes |= _with_ds_config(setup, changes)
    for field, says in setup.open.items():
        if changes.get(field, getattr(request, field)) is None:
            flag = f"--{field.replace('_', '-')}"
            changes["unmodelled"] = (*changes["unmodelled"], Unmodelled(flag, Effect.UNKNOWN, says))
    if setup.alloc_conf:
        changes |= _allocator(request, setup, changes["unmodelled"])
    for option, value in setup.options.items():
        if option in request and request.said[option] != value:
            what = f"{name} says {value} ({setup.keys[option]}), the flag {request.said[option]}"
            raise BadInput(what, where=OPTIONS[option].where, remedy="change one of the two")
        changes[option] = value
    changes["told_by_file"] = True
    whole = request.replace(files=(), **changes)
    return whole if setup.degrees else _with_global_batch(whole, setup)


def _allocator(request: Ask, setup: Setup, left_out: tuple[Unmodelled, ...]) -> dict[str, Any]:
    """The allocator's settings that the command line gives; those that are not simulated stand among what is left out.

    Raises:
        BadInput: a flag that contradicts them.
    """
    key = setup.keys["alloc_conf"]
    if request.alloc_conf not in ("", setup.alloc_conf):
        what = f"{setup.files[0]} says {setup.alloc_conf[:60]} ({key}), the flag {request.alloc_conf[:60]}"
        raise BadInput(what, where="--alloc-conf", remedy="change one of the two")
    try:
        AllocatorConfig.parse(setup.alloc_conf)
    except BadInput as error:
        return {"unmodelled": (*left_out, Unmodelled(key, Effect.UNKNOWN, error.what[:120]))}
    return {"alloc_conf": setup.alloc_conf}


def _reads_ds_config_itself(request: Ask, setup: Setup) -> bool:
    """Return whether the engine that was asked for reads the setup's ds_config in its own way.

    A ds_config by itself names no program. One that a program hands over goes to DeepSpeed, unless another engine that reads
    it is asked for by name: such an engine takes DeepSpeed's place in the program.
    """
    if find_engine(request.engine).dialect is None:
        return False
    if setup.program == "ds_config":
        return True
    return request.engine != DEFAULT_ENGINE and setup.engine is not None and find_engine(setup.engine).dialect is not None


def _pairs(setup: Setup, left_out: tuple[Unmodelled, ...]) -> dict[str, Any]:
    """What passes beside plain samples; a quantised model without its adapters stands among what is left out."""
    passes: dict[str, Any] = {
        "pairs": setup.pairs,
        "kl_batch": setup.kl_batch,
        "pair_loss": None if setup.pair_loss is None else PairLoss(setup.pair_loss),
    }
    if setup.reference is None or setup.quantize is None:
        return passes | {"reference": None if setup.reference is None else Reference(setup.reference)}
    says = "the forward of the quantised model without adapters"
    return passes | {"unmodelled": (*left_out, Unmodelled(f"task {setup.task}", Effect.MORE, says))}


def _saving(request: Ask, setup: Setup) -> dict[str, Any]:
    """Saving by the setup's program, in the form that FSDP has there; a flag decides the form where the file leaves it open.

    Raises:
        BadInput: a flag that contradicts the setup.
    """
    said = {"save": setup.state_dict, "save_by": setup.saver}
    for field, value in said.items():
        asked = getattr(request, field)
        if value is not None and asked not in (None, value):
            flag = f"--{field.replace('_', '-')}"
            raise BadInput(f"the file says {value}, the flag {asked}", where=flag, remedy="change one of the two")
    return {
        "save": request.save or setup.state_dict or "full",
        "save_by": request.save_by or setup.saver,
        "save_only_model": request.save_only_model or setup.save_only_model,
    }


def left_out(setup: Setup) -> tuple[Unmodelled, ...]:
    """Return what plans of a setup leave out: what its program's reader says, and what its own engine does not model."""
    engine, found = setup.engine or DEFAULT_ENGINE, setup.unmodelled
    for said, planned in ((setup.quantize, _quantized), (setup.fp8, _float8), (setup.compile, _compiled)):
        if said is not None:
            found = planned(setup, engine, found).get("unmodelled", found)
    return found


def _quantized(setup: Setup, engine: str, left_out: tuple[Unmodelled, ...]) -> dict[str, Any]:
    """The quantised base under an engine that plans it; under another, or offloaded, it stands among what is left out."""
    key = setup.keys.get("quantize", "quantize")
    if QUANTIZED_BASE.taken_by(find_engine(engine)) and setup.lora_rank is not None and _plans_base(setup):
        adapters = {"adapter_dtype": setup.adapter_dtype, "whole_base": setup.whole_base}
        return {"quantize": setup.quantize, "quantized_by": key} | adapters
    says = f"base weights in {setup.quantize} are counted in 16 bits, and their dequantised copies are not"
    return {"unmodelled": (*left_out, Unmodelled(key, Effect.UNKNOWN, says))}


def _plans_base(setup: Setup) -> bool:
    """Whether a quantised base is planned as the setup shards it: on the GPU, by data parallelism, and at stage 3 in 4 bits."""
    zero = (setup.ds_config or {}).get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    said = zero.get("offload_param")
    device = said.get("device") if isinstance(said, Mapping) else said
    offloads = setup.offload_param not in (None, "none") or device not in (None, "none", False)
    return not (offloads or setup.degrees or (setup.quantize == Quantization.INT8 and zero.get("stage") == 3))


def _float8(setup: Setup, engine: str, left_out: tuple[Unmodelled, ...]) -> dict[str, Any]:
    """8-bit products under an engine that plans them; under another, or beside adapters, they stand among what is left out."""
    if FLOAT8.taken_by(find_engine(engine)) and setup.lora_rank is None and not setup.degrees:
        return {"fp8": setup.fp8}
    key = setup.keys.get("fp8", "fp8")
    return {"unmodelled": (*left_out, Unmodelled(key, Effect.UNKNOWN, "fp8 products; bf16 ones are counted"))}


def _compiled(setup: Setup, engine: str, left_out: tuple[Unmodelled, ...]) -> dict[str, Any]:
    """Compiled graphs under an engine that plans them; under another, or beside what no graph is traced with, they stand among
    what is left out.
    """
    selective = setup.checkpoint_policy is not None and CheckpointPolicy.parse(setup.checkpoint_policy).selective
    others = selective or setup.quantize is not None or setup.fp8 is not None or bool(setup.degrees)
    if COMPILED.taken_by(find_engine(engine)) and not others:
        return {"compile": setup.compile}
    return {"unmodelled": (*left_out, without_graphs(setup))}


def without_graphs(setup: Setup) -> Unmodelled:
    """What a plan of a compiled run leaves out that counts its eager graphs."""
    key = setup.keys.get("compile", "compile")
    return Unmodelled(key, Effect.UNKNOWN, "compiled graphs keep other tensors than eager ones, which are counted")


def _precision(setup: Setup) -> Precision | None:
    """Return the division of dtypes where the engine reads no ds_config; None leaves it to the engine: an fp32 model.

    Under FSDP accelerate makes 16-bit parameters that are trained fp32 before it shards them; frozen ones stay as they are.
    Source: accelerate 1.15, utils/fsdp_utils.py (fsdp2_prepare_model), accelerator.py (prepare_model).
    """
    if setup.ds_config is not None or setup.dtype not in ("bf16", "fp16") or setup.model_dtype not in ("bf16", "fp16"):
        return None
    if not setup.autocast:
        return Precision.PURE
    return None if setup.stage is not None and setup.lora_rank is None else Precision.HALF_AUTOCAST


def _with_ds_config(setup: Setup, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the ds_config as its program completes it.

    Its optimizer wins over the program's own; without a precision block the program adds the one of its arithmetic.
    Source: transformers 5.17, integrations/deepspeed.py (deepspeed_optim_sched); accelerate 1.15, utils/dataclasses.py
    (DeepSpeedPlugin.set_mixed_precision).
    """
    config = dict(setup.ds_config or {})
    dtype = changes.get("dtype")
    if dtype in ("bf16", "fp16") and "bf16" not in config and "fp16" not in config and "torch_autocast" not in config:
        config[dtype] = {"enabled": True}
    own: dict[str, Any] = {"ds_config": config}
    if config.get("optimizer"):
        own |= {"optimizer": None, "optimizer_kind": None}
    return own


def _plain(field: str, value: Any) -> Any:
    if field == "dtype":
        return DType(value).value
    if field == "optimizer":
        from zeroplan.core.optimizers import known_optimizer

        return known_optimizer(value)
    return value
