"""Flags and files become one Ask: files decide, flags fill what they leave open, and a contradiction is bad input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.quantization import Quantization
from zeroplan.core.tasks import training_of
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import CheckpointPolicy, DType, Precision
from zeroplan.engines.registry import find_engine
from zeroplan.interop.readers import read_setups
from zeroplan.interop.setups import Setup
from zeroplan.run.ask import MESH_OPTIONS, OPTIONS, Ask
from zeroplan.run.options import DEFAULT_ENGINE
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.techniques.compiled import COMPILED
from zeroplan.techniques.float8 import FLOAT8, Float8Technique
from zeroplan.techniques.quantized_base import QUANTIZED_BASE
from zeroplan.techniques.reduced_gradients import REDUCED_GRADIENTS

#: Options of files of which more than their value decides what is taken: each has a function below, or a line of :func:`merge`.
_DECIDED_BELOW = (
    *("model", "gpus", "nodes", "engine", "alloc_conf", "ds_config", "reduce_dtype", "deepspeed_version", "pads", "one_unit"),
    *("model_dtype", "autocast", "fsdp_version", "dp_shard", "replicates", "global_batch", "lit_model", "ppo", "head"),
    *("saves", "state_dict", "saver", "save_only_model", "reference", "quantize", "adapter_dtype", "whole_base", "fp8"),
    *("compile", *MESH_OPTIONS),
)
#: Options whose flag stands without a word of it: the question is of such a model, or of such a machine.
_UNREPORTED = ("model", "params", "task")
_ONE = "change one of the two"


def with_files(request: Ask, usual: str = DEFAULT_ENGINE) -> tuple[Ask, Setup]:
    """Read the request's files; returns the request that they fill, and what they say.

    Args:
        usual: the engine where nobody says one.

    Raises:
        BadInput: files that cannot be read or that a flag contradicts.
    """
    setup = reported(read_setups(request.files, request.program, training_of(request.task)), request)
    return _with_layout(merge(request, setup, usual), setup), setup


def reported(setup: Setup, request: Ask) -> Setup:
    """Return the setup, among whose assumptions stands what flags say in place of its files."""
    machine = Cluster.of(gpus=request.gpus, nodes=request.nodes, gpu=request.gpu)
    said = []
    for name, what in (("gpus", "GPUs a node"), ("nodes", "nodes")):
        theirs, ours = setup.value(name), getattr(machine, name)
        if theirs not in (None, ours) and (ours != 1 or name in request):
            said.append(f"{ours} {what} by the flags, where {setup.key(name)} makes it {theirs}")
    for name, value in request.said.items():
        option, theirs = OPTIONS[name], setup.value(name)
        if option.wins and theirs not in (None, (), value) and name not in (*_UNREPORTED, "gpus", "nodes"):
            said.append(f"{option.where} {value}, where {setup.key(name)} says {theirs}")
    return replace(setup, assumed=(*setup.assumed, *said))


def merge(request: Ask, setup: Setup, usual: str = DEFAULT_ENGINE, *, search: bool = False) -> Ask:
    """Return the request filled with a setup's values; degrees of parallelism stay among what is left out.

    Args:
        request: what flags say.
        setup: what files say.
        usual: the engine where nobody says one.
        search: whether the flags say what to search, so that their engine is not the run's.

    Raises:
        BadInput: a flag that contradicts the setup, with both sources.
    """
    files = setup.files[0] if setup.files else setup.program
    if training_of(request.task) is not None:
        request = request.replace(task=None)  # it has named the run, not the head
    values: dict[str, Any] = {}
    for name, said in setup.ask.said.items():
        option = OPTIONS[name]
        if name in _DECIDED_BELOW or (option.wins and request.said.get(name) not in (None, ())):
            continue
        if name in request and _plain(name, request.said[name]) != said:
            _contradict(files, setup, name, said, request.said[name])
        values[name] = said
    values |= _model_and_machine(request, setup)
    engine = _engine(request, setup, usual, search=search)
    left_out = setup.unmodelled
    if engine is not None:
        values["engine"] = engine
    if _is_fsdp_1(setup):
        left_out = tuple(one for one in left_out if one.key != setup.ask.source("engine") or one.effect is not Effect.UNKNOWN)
    merged = request.replace(files=None, told_by_file=True, unmodelled=(*request.unmodelled, *left_out), **values)
    merged = merged.by({name: f"{files}: {setup.key(name)}" for name in values if name in setup.ask})
    if "engine" not in merged:
        merged = merged.replace(engine=usual)
    merged = merged.replace(**_of_engine(merged, request, setup))
    for name, says in setup.open.items():
        if getattr(merged, name) is None:
            merged = _leaving_out(merged, Unmodelled(OPTIONS[name].where, Effect.UNKNOWN, says))
    if setup.ask.alloc_conf:
        merged = _with_allocator(merged, request, setup)
    return merged if setup.degrees else _with_global_batch(merged, setup)


def _contradict(files: str, setup: Setup, name: str, said: Any, asked: Any) -> None:
    """Refuse a flag that says otherwise than a file. Raises BadInput: always."""
    shown = str(said).lower() if isinstance(said, bool) else said
    what = f"{files} says {shown} ({setup.key(name)}), the flag {asked}"
    if isinstance(said, bool):
        what = f"{files} says {shown} ({setup.key(name)})"
    raise BadInput(what, where=OPTIONS[name].where, remedy=_ONE)


def _model_and_machine(request: Ask, setup: Setup) -> dict[str, Any]:
    """The files' model, GPUs and nodes, where no flag says them; ``--gpu`` may hold the count."""
    found = {}
    if request.model is None and request.params is None:
        found["model"] = setup.ask.model
    machine = Cluster.of(gpus=request.gpus, nodes=request.nodes, gpu=request.gpu)
    for name in ("gpus", "nodes"):
        if name in setup.ask and getattr(machine, name) == 1 and name not in request:
            found[name] = setup.value(name)
    if setup.ask.head is not None and request.task is None and request.params is None:
        found["task"] = setup.ask.head
    return {name: value for name, value in found.items() if value is not None}


def _engine(request: Ask, setup: Setup, usual: str, *, search: bool) -> str | None:
    """Return the engine that the files decide; None where the request's stands.

    A ds_config by itself names no program. One that a program hands over goes to DeepSpeed, unless another engine that reads it
    is asked for by name: such an engine takes DeepSpeed's place in the program.

    Raises:
        BadInput: a flag that asks for another engine than the files start.
    """
    theirs, ours = "fsdp" if _is_fsdp_1(setup) else setup.value("engine"), request.said.get("engine", usual)
    if theirs is None or theirs == ours:
        return None
    if find_engine(ours).dialect is not None and (
        setup.program == "ds_config" or (ours != DEFAULT_ENGINE and find_engine(theirs).dialect is not None)
    ):
        return None
    if "engine" in request and not search:
        by = (
            f"{setup.files[0]} says {theirs} ({key})"
            if (key := setup.ask.source("engine"))
            else f"{setup.title} starts {theirs}"
        )
        raise BadInput(f"{by}, the flag {ours}", where="--engine", remedy=_ONE)
    return str(theirs)


def _is_fsdp_1(setup: Setup) -> bool:
    return setup.ask.fsdp_version == 1 and setup.ask.offload_param is None


def _of_engine(merged: Ask, request: Ask, setup: Setup) -> dict[str, Any]:
    """What of the files' values depends on the engine, or on other values."""
    files, engine = setup.ask, find_engine(merged.engine)
    found: dict[str, Any] = {"precision": _precision(setup), "torch_adam": True if files.optimizer_kind is not None else None}
    if found["precision"] is None and request.base_dtype is None and _frozen_in_fp32(setup, merged):
        found["base_dtype"] = "fp32"
    found["one_unit"] = files.one_unit and files.lora_rank is None  # peft's policy takes the place of every other
    found["pads"] = files.pads and request.lengths is None
    if files.reduce_dtype is not None and REDUCED_GRADIENTS.taken_by(engine):
        own = merged.dtype or "bf16"
        found["reduce_dtype"] = request.reduce_dtype or (own if files.reduce_dtype == "products" else files.reduce_dtype)
    if files.deepspeed_version is not None and merged.engine == DEFAULT_ENGINE:
        found["deepspeed_version"] = request.deepspeed_version or files.deepspeed_version
    if files.saves:
        found |= _saving(request, setup)
    left_out: list[Unmodelled] = []
    if files.reference is not None:
        if files.quantize is None:
            found["reference"] = files.reference
        else:
            says = "the forward of the quantised model without adapters"
            left_out.append(Unmodelled(f"task {setup.task}", Effect.MORE, says))
    for name, planned in _PLANNED.items():
        if name not in files or (name != "quantize" and name in request):
            continue
        if name in request and request.said[name] != files.said[name]:
            _contradict(setup.files[0], setup, name, files.said[name], request.said[name])
        taken = planned(setup, merged.engine)
        if isinstance(taken, Unmodelled):
            left_out.append(taken)
        else:
            found |= taken
    if setup.ds_config is not None:
        if request.ds_config not in (None, setup.ds_config):
            what = f"{setup.files[0]} brings a ds_config of its own ({setup.key('ds_config')})"
            raise BadInput(what, where="--ds-config", remedy="leave one of the two out")
        found |= _with_ds_config(setup.ds_config, files.dtype)
    return {**found, "unmodelled": (*merged.unmodelled, *left_out)}


def _leaving_out(request: Ask, one: Unmodelled) -> Ask:
    return request.replace(unmodelled=(*request.unmodelled, one))


def _with_allocator(merged: Ask, request: Ask, setup: Setup) -> Ask:
    """Return the ask with the allocator's settings of the command line; those not simulated stand among what is left out.

    Raises:
        BadInput: a flag that contradicts them.
    """
    theirs, key = setup.ask.alloc_conf, setup.key("alloc_conf")
    if request.alloc_conf not in ("", theirs):
        what = f"{setup.files[0]} says {theirs[:60]} ({key}), the flag {request.alloc_conf[:60]}"
        raise BadInput(what, where="--alloc-conf", remedy=_ONE)
    try:
        AllocatorConfig.parse(theirs)
    except BadInput as error:
        return _leaving_out(merged, Unmodelled(key, Effect.UNKNOWN, error.what[:120]))
    return merged.replace(alloc_conf=theirs)


def _saving(request: Ask, setup: Setup) -> dict[str, Any]:
    """Saving by the setup's program, in the form that FSDP has there; a flag decides the form where the file leaves it open.

    Raises:
        BadInput: a flag that contradicts the setup.
    """
    files = setup.ask
    for name, value in (("save", files.state_dict), ("save_by", files.saver)):
        asked = request.said.get(name)
        if value is not None and asked not in (None, value):
            raise BadInput(f"the file says {value}, the flag {asked}", where=OPTIONS[name].where, remedy=_ONE)
    return {
        "save": request.save or files.state_dict or "full",
        "save_by": request.save_by or files.saver,
        "save_only_model": request.save_only_model or files.save_only_model,
    }


# --- what an engine may not plan --------------------------------------------------------------------------------------------


def left_out(setup: Setup) -> tuple[Unmodelled, ...]:
    """Return what plans of a setup leave out: what its program's reader says, and what its own engine does not model."""
    engine = setup.ask.engine
    found = [planned(setup, engine) for name, planned in _PLANNED.items() if name in setup.ask]
    return (*setup.unmodelled, *(one for one in found if isinstance(one, Unmodelled)))


def _quantized(setup: Setup, engine: str) -> dict[str, Any] | Unmodelled:
    """The quantised base under an engine that plans it; under another, or offloaded, it stands among what is left out."""
    files, key = setup.ask, setup.key("quantize")
    if QUANTIZED_BASE.taken_by(find_engine(engine)) and files.lora_rank is not None and _plans_base(setup):
        adapters = {"adapter_dtype": files.adapter_dtype, "whole_base": files.whole_base}
        return {"quantize": files.quantize, "quantized_by": key, **adapters}
    says = f"base weights in {files.quantize} are counted in 16 bits, and their dequantised copies are not"
    return Unmodelled(key, Effect.UNKNOWN, says)


def _plans_base(setup: Setup) -> bool:
    """Whether a quantised base is planned as the setup shards it: on the GPU, by data parallelism, and at stage 3 in 4 bits."""
    zero = (setup.ds_config or {}).get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    said = zero.get("offload_param")
    device = said.get("device") if isinstance(said, Mapping) else said
    offloads = setup.ask.offload_param not in (None, "none") or device not in (None, "none", False)
    return not (offloads or setup.degrees or (setup.ask.quantize == Quantization.INT8 and zero.get("stage") == 3))


def _float8(setup: Setup, engine: str) -> dict[str, Any] | Unmodelled:
    """8-bit products under an engine that plans them; under another, or beside adapters, they stand among what is left out."""
    if FLOAT8.taken_by(find_engine(engine)) and setup.ask.lora_rank is None and not setup.degrees:
        return {"fp8": setup.ask[Float8Technique.fp8]}
    return Unmodelled(setup.key("fp8"), Effect.UNKNOWN, "fp8 products; bf16 ones are counted")


def _compiled(setup: Setup, engine: str) -> dict[str, Any] | Unmodelled:
    """Compiled graphs under an engine that plans them; under another, or beside what no graph is traced with, they stand among
    what is left out.
    """
    selective = CheckpointPolicy.parse(setup.ask.checkpoint_policy).selective
    others = selective or setup.ask.quantize is not None or setup.ask[Float8Technique.fp8] is not None or bool(setup.degrees)
    if COMPILED.taken_by(find_engine(engine)) and not others:
        return {"compile": setup.ask.compile}
    return without_graphs(setup)


_PLANNED = {"quantize": _quantized, "fp8": _float8, "compile": _compiled}


def without_graphs(setup: Setup) -> Unmodelled:
    """What a plan of a compiled run leaves out that counts its eager graphs."""
    says = "compiled graphs keep other tensors than eager ones, which are counted"
    return Unmodelled(setup.key("compile"), Effect.UNKNOWN, says)


# --- precision and ds_config ------------------------------------------------------------------------------------------------


def _frozen_in_fp32(setup: Setup, merged: Ask) -> bool:
    """Return whether frozen weights under adapters are fp32, as the files leave them where their engine keeps them so."""
    files = setup.ask
    if files.lora_rank is None or files.quantize is not None or files.dtype not in ("bf16", "fp16"):
        return False
    engine, dtype = find_engine(merged.engine), DType(files.dtype)
    return engine.base_precision(dtype, None) is not engine.precision(dtype)


def _precision(setup: Setup) -> Precision | None:
    """Return the division of dtypes where the engine reads no ds_config; None leaves it to the engine: an fp32 model.

    Under FSDP accelerate makes 16-bit parameters that are trained fp32 before it shards them; frozen ones stay as they are.
    Source: accelerate 1.15, utils/fsdp_utils.py (fsdp2_prepare_model), accelerator.py (prepare_model).
    """
    files = setup.ask
    if setup.ds_config is not None or files.dtype not in ("bf16", "fp16") or files.model_dtype not in ("bf16", "fp16"):
        return None
    if not files.autocast:
        return Precision.PURE
    return None if files.stage is not None and files.lora_rank is None else Precision.HALF_AUTOCAST


def _with_ds_config(found: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return the ds_config as its program completes it.

    Its optimizer wins over the program's own; without a precision block the program adds the one of its arithmetic.
    Source: transformers 5.17, integrations/deepspeed.py (deepspeed_optim_sched); accelerate 1.15, utils/dataclasses.py
    (DeepSpeedPlugin.set_mixed_precision).
    """
    config = dict(found)
    if dtype in ("bf16", "fp16") and "bf16" not in config and "fp16" not in config and "torch_autocast" not in config:
        config[dtype] = {"enabled": True}
    own: dict[str, Any] = {"ds_config": config}
    if config.get("optimizer"):
        own |= {"optimizer": None, "optimizer_kind": None}
    return own


def _plain(name: str, value: Any) -> Any:
    if name == "dtype":
        return DType(value).value
    if name == "optimizer":
        from zeroplan.core.optimizers import known_optimizer

        return known_optimizer(value)
    return value


# --- degrees of parallelism -------------------------------------------------------------------------------------------------


def _with_layout(request: Ask, setup: Setup) -> Ask:
    """Return the request with the setup's degrees, whose keys then no longer stand among what is left out.

    Raises:
        BadInput: a flag that contradicts the setup, or degrees that are not those of the ranks.
    """
    for name, said in setup.degrees.items():
        asked = getattr(request, name)
        if asked not in (OPTIONS[name].default, said):
            _contradict(setup.files[0], setup, name, said, asked)
    planned = {setup.key(name) for name in (*setup.degrees, *(("dp_shard",) if setup.ask.replicates else ()))}
    left_out = tuple(one for one in request.unmodelled if one.key not in planned)
    changed = request.replace(**setup.degrees, unmodelled=left_out)
    shard = setup.ask.dp_shard
    if shard is not None and setup.ask.replicates:
        changed = changed.replace(dp_replicate=_ranks(changed) // shard or 1)
    _require_ranks(changed, setup)
    return _with_global_batch(changed, setup)


def _require_ranks(request: Ask, setup: Setup) -> None:
    """Hold the setup's degrees against the ranks, as programs do that are told all of them.

    Raises:
        BadInput: naming the product that the ranks are not, or that the number of GPUs is missing.
    """
    degrees = {name: getattr(request, name) for name in ("dp_replicate", "cp", "ulysses", "tp", "pp")}
    if setup.ask.dp_shard is not None:
        degrees["dp_shard"] = setup.ask.dp_shard
    product = math.prod(degrees.values())
    ranks = _ranks(request)
    if ranks == 1 < product and "gpus" not in setup.ask:
        raise BadInput(
            f"{_factors(degrees)} needs that many ranks, and nothing says how many there are",
            where=setup.files[0],
            remedy="give --gpus and --nodes",
        )
    if setup.ask.dp_shard is not None and product != ranks:
        raise BadInput(
            f"{_factors(degrees)} is not the {ranks} ranks of {request.nodes} nodes",
            where=f"{setup.files[0]}: {setup.key('dp_shard')}",
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
    batch = setup.ask.global_batch
    if batch is None or request.grad_accum is not None:
        return request
    data_parallel = max(1, _ranks(request) // (request.tp * request.cp * request.ulysses * request.pp))
    micro = request.micro_batch or 1
    if batch % (data_parallel * micro):
        raise BadInput(
            f"{data_parallel} data-parallel ranks × {micro} samples do not divide the global batch of {batch}",
            where=f"{setup.files[0]}: {setup.key('global_batch')}",
            remedy=f"use a multiple of {data_parallel * micro}",
        )
    return request.replace(grad_accum=batch // (data_parallel * micro))
