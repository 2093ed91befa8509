"""``--from``: what a run in use would need, and the search over everything that its file does not have to decide."""

from __future__ import annotations

from dataclasses import fields, replace

from zeroplan.core.errors import BadInput
from zeroplan.core.tasks import training_of
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.registry import find_engine
from zeroplan.interop.readers import read_setups
from zeroplan.interop.setups import Setup
from zeroplan.interop.training import Training, read_training
from zeroplan.planner.describe import UNSEARCHED
from zeroplan.planner.from_files import filled, told_of_machine, without_graphs
from zeroplan.planner.request import Request
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.recommend import rank_all
from zeroplan.search.results import Recommendation, recommendation
from zeroplan.search.search_options import ResolvedSearch, SearchOptions, resolve_search
from zeroplan.search.space import Candidate


def with_source(request: Request, options: SearchOptions) -> tuple[Request, SearchOptions, Recommendation]:
    """Fill the request and the options from the source; returns them with the source's own configuration, predicted.

    The search keeps the source's model, sequence length, precision, optimizer, adapters and global batch, and is free in
    how the batch is split, sharded, offloaded and checkpointed.

    Raises:
        BadInput: a source that cannot be read, lacks a model, or contradicts a flag.
    """
    sources = list(options.source) if isinstance(options.source, list | tuple) else [options.source]
    setup = told_of_machine(read_setups(sources, options.program, training_of(request.task)), request)
    # The split of the batch is the search's, so flags of it bind the search and not the run in use.
    unbound = replace(request, micro_batch=None, grad_accum=None, compile=None)
    asked = filled(unbound, setup)
    changes = {field.name for field in fields(Request) if getattr(asked, field.name) != getattr(unbound, field.name)}
    try:
        return _free_search(asked, request, options, setup)
    except BadInput as error:
        raise _in_its_words(error, setup, changes) from None


def _free_search(
    asked: Request, request: Request, options: SearchOptions, setup: Setup
) -> tuple[Request, SearchOptions, Recommendation]:
    """Return the request with the setup's choices left free, the options, and the setup's own row."""
    if asked.model is None and asked.params is None:
        raise BadInput(f"the file of {setup.title} names no model", where="MODEL", remedy="give one before --from")
    plain = replace(options, source=None, candidates=None)
    resolved = resolve_search(asked, plain)
    candidate = _candidate(setup, asked, resolved)
    for name, (key, says) in UNSEARCHED.items():
        if getattr(candidate.workload, name):
            raise BadInput(says, where=key, remedy="plan it by zeroplan estimate --ds-config FILE, or leave the section out")
    engine = candidate.engine or resolved.engine
    memory = Memory(engine, resolved.spec, resolved.cluster, depth=request.depth)
    cost = CostModel(engine, resolved.spec, resolved.cluster, resolved.rates)
    current = recommendation(engine, rank_all([candidate], memory, cost)[0], 0, resolved.cluster.layout)
    work = candidate.workload
    batch = options.global_batch or work.micro_batch * work.grad_accum * resolved.cluster.layout.dp
    free = replace(
        asked,
        micro_batch=request.micro_batch,
        grad_accum=request.grad_accum,
        stage=request.stage,
        offload_optimizer=request.offload_optimizer,
        offload_param=request.offload_param,
        engine=request.engine,
        ds_config=None,
        dtype=work.dtype.value,
        optimizer=work.optimizer,
        optimizer_kind=None,
        precision=None,
        alloc_conf=request.alloc_conf,
        gradient_checkpointing=False,
        reduce_dtype=asked.reduce_dtype if find_engine(request.engine).reduces_as_told else None,
    )
    if request.compile is not None:
        free = replace(free, compile=request.compile)
    elif asked.compile is not None and not find_engine(request.engine).compiles:
        free = replace(free, compile=None, unmodelled=(*asked.unmodelled, without_graphs(setup)))
    said = [setup.line, *(f"{one.key}: {one.says}" for one in setup.unmodelled)]
    notes = (*said, *(text.removeprefix("candidate 0: ") for text in resolved.warnings if text.startswith("candidate")))
    return free, replace(plain, global_batch=batch, notes=notes, training=training_said(setup)), current


def training_said(setup: Setup) -> Training:
    """Return what the source says of training. A ds_config has the last word, as in its programs; without a norm it clips
    nothing. Source: DeepSpeed 0.19.8, runtime/constants.py (GRADIENT_CLIPPING_DEFAULT).
    """
    if setup.ds_config is None:
        return setup.training
    found = read_training(setup.ds_config, setup.training.file)
    if "gradient_clipping" not in setup.ds_config:
        found = replace(found, values={**found.values, "max_grad_norm": 0.0})
    return found.over(setup.training)


#: Flags and keys of a ds_config by the field of a Request that they fill.
_FLAGS = {
    "MODEL": "model",
    "--micro-batch": "micro_batch",
    "--grad-accum": "grad_accum",
    "--seq-len": "seq_len",
    "--dtype": "dtype",
    "--optimizer": "optimizer",
    "--lora-rank": "lora_rank",
    "--lora-targets": "lora_targets",
    "--gpus": "gpus",
    "--nodes": "nodes",
}
_DS_CONFIG = "ds_config: "
_KEYS = {
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "grad_accum",
    "bf16.enabled": "dtype",
    "fp16.enabled": "dtype",
    "optimizer.type": "optimizer",
}


def _in_its_words(error: BadInput, setup: Setup, changes: set[str]) -> BadInput:
    """Return the error in the source's words: its file, and its program where not a flag but the file is wrong."""
    name = setup.files[0] if setup.files else setup.title
    if error.where.startswith(_DS_CONFIG):
        key = error.where.removeprefix(_DS_CONFIG)
        inner = name if setup.program == "ds_config" else f"{name}: its ds_config"
        what = error.what
        if _KEYS.get(key) in changes:
            what = what.replace("the file says", "says").replace("the flags say", f"{setup.title} has")
        return BadInput(what, where=f"{inner}: {key}", remedy=error.remedy)
    if _FLAGS.get(error.where) in changes:
        return BadInput(error.what, where=f"{name} ({error.where})", remedy=error.remedy)
    return error


def _candidate(setup: Setup, request: Request, resolved: ResolvedSearch) -> Candidate:
    again = bool(setup.gradient_checkpointing)
    if isinstance(request.ds_config, dict):
        from zeroplan.search.candidates_file import candidate_of

        return candidate_of(request.ds_config, resolved, request, again)
    workload = replace(resolved.workload, gradient_checkpointing=again)
    zero = resolved.engine.default()
    if setup.stage is not None:
        zero = ZeroConfig.of(setup.stage, setup.offload_optimizer or "none", setup.offload_param or "none")
    return Candidate(resolved.engine.for_optimizer(zero, workload.optimizer), workload, request.alloc_conf)
