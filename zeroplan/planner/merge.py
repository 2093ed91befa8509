"""Flags and files become one Ask: files decide, flags fill what they leave open, and a contradiction is bad input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.option import MESH
from zeroplan.core.tasks import training_of
from zeroplan.core.unmodelled import OVER_GPUS, Effect, Unmodelled
from zeroplan.core.workload import DType, Precision
from zeroplan.engines.base import Engine
from zeroplan.engines.registry import find_engine
from zeroplan.interop.readers import read_setups
from zeroplan.interop.setups import Setup
from zeroplan.run.ask import OPTIONS, Ask
from zeroplan.run.options import DEFAULT_ENGINE
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.techniques.base import FileFacts
from zeroplan.techniques.lora import LoraTechnique
from zeroplan.techniques.table import TABLE

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
            said.append(f"{ours} {what} by the flags, {theirs} by {setup.key(name)}")
    for name, value in request.values.items():
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
    for name, said in setup.ask.values.items():
        option = OPTIONS[name]
        if not option.merges or option.panel == MESH or (option.wins and request.values.get(name) not in (None, ())):
            continue
        if name in request and _plain(name, request.values[name]) != said:
            _contradict(files, setup, name, said, request.values[name])
        values[name] = said
    values |= _model_and_machine(request, setup)
    engine = _engine(request, setup, usual, search=search)
    left_out = setup.unmodelled
    if engine is not None:
        values["engine"] = engine
    if _is_fsdp_1(setup):
        left_out = tuple(one for one in left_out if one.key != setup.ask.source("engine") or one.effect is not Effect.UNKNOWN)
    gpus, nodes = (values.get(name, request.value(name)) for name in ("gpus", "nodes"))
    machine = Cluster.of(gpus=gpus, nodes=nodes, gpu=request.gpu)
    if machine.gpus * machine.nodes == 1:
        left_out = tuple(one for one in left_out if one.key != OVER_GPUS)
    merged = request.replace(files=None, described_by_files=True, unmodelled=(*request.unmodelled, *left_out), **values)
    merged = merged.by({name: f"{files}: {setup.key(name)}" for name in values if name in setup.ask})
    if "engine" not in merged:
        merged = merged.replace(engine=usual)
    merged = merged.replace(**_of_engine(merged, request, setup))
    for name, says in setup.open.items():
        if merged.value(name) is None:
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
    theirs, ours = "fsdp" if _is_fsdp_1(setup) else setup.value("engine"), request.values.get("engine", usual)
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
    return setup.ask.fsdp_version == 1


def _of_engine(merged: Ask, request: Ask, setup: Setup) -> dict[str, Any]:
    """What of the files' values depends on the engine, or on other values."""
    files, engine = setup.ask, find_engine(merged.engine)
    found: dict[str, Any] = {"precision": _precision(setup), "torch_adam": True if files.optimizer_kind is not None else None}
    if found["precision"] is None and request[LoraTechnique.base_dtype] is None and _frozen_in_fp32(setup, merged):
        found["base_dtype"] = "fp32"
    found["one_unit"] = files.one_unit and "lora_rank" not in files  # peft's policy takes the place of every other
    if files.deepspeed_version is not None and merged.engine == DEFAULT_ENGINE:
        found["deepspeed_version"] = request.deepspeed_version or files.deepspeed_version
    filled, left_out = _of_techniques(setup, request, engine)
    found |= filled
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


# --- what an engine may not plan --------------------------------------------------------------------------------------------


def _of_techniques(setup: Setup, request: Ask, engine: Engine) -> tuple[dict[str, Any], list[Unmodelled]]:
    """Return the options that techniques make of the files', and what the figures then leave out.

    Raises:
        BadInput: a flag that contradicts the files.
    """
    facts = FileFacts(setup.ask, request, engine, degrees=bool(setup.degrees), task=setup.task)
    found: dict[str, Any] = {}
    left_out: list[Unmodelled] = []
    for technique in TABLE:
        name = technique.decides
        if name not in setup.ask or (OPTIONS[name].wins and name in request):
            continue
        said = setup.ask.values[name]
        if name in request and request.values[name] != said:
            _contradict(setup.files[0], setup, name, said, request.values[name])
        filled = technique.filled(said, facts)
        if isinstance(filled, Unmodelled):
            left_out.append(filled)
        else:
            found |= filled
    return found, left_out


def left_out(setup: Setup) -> tuple[Unmodelled, ...]:
    """Return what plans of a setup leave out: what its program's reader says, and what its own engine does not model."""
    return (*setup.unmodelled, *_of_techniques(setup, Ask(), find_engine(setup.ask.engine))[1])


# --- precision and ds_config ------------------------------------------------------------------------------------------------


def _frozen_in_fp32(setup: Setup, merged: Ask) -> bool:
    """Return whether frozen weights under adapters are fp32, as the files leave them where their engine keeps them so."""
    files = setup.ask
    if "lora_rank" not in files or "quantize" in files or files.dtype not in ("bf16", "fp16"):
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
    return None if files.stage is not None and "lora_rank" not in files else Precision.HALF_AUTOCAST


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
        asked = request.value(name)
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
    degrees = {name: request.value(name) for name in ("dp_replicate", "cp", "ulysses", "tp", "pp")}
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
