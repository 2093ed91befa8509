"""``--from``: what a run in use would need, and the search over everything that its file does not have to decide."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from zeroplan.core.errors import BadInput
from zeroplan.core.tasks import training_of
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.registry import find_engine
from zeroplan.engines.words import other_engine
from zeroplan.interop.readers import read_setups
from zeroplan.interop.setups import Setup
from zeroplan.interop.training import Training, read_training
from zeroplan.planner.merge import merge, reported
from zeroplan.run.ask import OPTIONS, Ask
from zeroplan.search.candidates_file import SHARED_KEYS
from zeroplan.search.cost import CostModel
from zeroplan.search.layout_orders import FIXED, flags_of
from zeroplan.search.memory import Memory
from zeroplan.search.recommend import rank_all
from zeroplan.search.results import Recommendation, recommendation
from zeroplan.search.search_options import ResolvedSearch, SearchOptions, resolve_search
from zeroplan.search.space import Candidate
from zeroplan.techniques.checkpointing import CheckpointingTechnique
from zeroplan.techniques.compiled import COMPILED, CompiledTechnique
from zeroplan.techniques.freeze import FrozenParts
from zeroplan.techniques.reduced_gradients import REDUCED_GRADIENTS
from zeroplan.techniques.table import found_in, techniques_of


def with_source(request: Ask, options: SearchOptions) -> tuple[Ask, SearchOptions, Recommendation | None]:
    """Fill the request and the options from the source; returns them with the source's own configuration, predicted; None where
    its ranks share the model, of which a note tells: the search is then of another layout.

    The search keeps the source's model, sequence length, precision, optimizer, adapters and global batch, and is free in
    how the batch is split, sharded, offloaded and checkpointed.

    Raises:
        BadInput: a source that cannot be read, lacks a model, or contradicts a flag.
    """
    sources = list(options.source) if isinstance(options.source, list | tuple) else [options.source]
    setup = reported(read_setups(sources, options.program, training_of(request.task)), request)
    # The split of the batch is the search's, so flags of it bind the search and not the run in use.
    unbound = request.replace(micro_batch=None, grad_accum=None, compile=None)
    asked = merge(unbound, setup, search=True)
    changes = {name for name, value in asked.values.items() if unbound.values.get(name) != value}
    try:
        return _free_search(asked, request, options, setup)
    except BadInput as error:
        raise _in_its_words(error, setup, changes) from None


def _free_search(
    asked: Ask, request: Ask, options: SearchOptions, setup: Setup
) -> tuple[Ask, SearchOptions, Recommendation | None]:
    """Return the request with the setup's choices left free, the options, and the setup's own row."""
    if asked.model is None and asked.params is None:
        raise BadInput(f"the file of {setup.title} names no model", where="MODEL", remedy="give one before --from")
    plain = replace(options, source=None, candidates=None)
    resolved = resolve_search(asked, plain)
    candidate = _candidate(setup, asked, resolved)
    candidate = replace(candidate, workload=found_in(candidate.workload, resolved.spec))
    frozen = candidate.workload.technique(FrozenParts)
    counted: tuple[Unmodelled, ...] = ()
    if frozen is not None and frozen.rule is not None and "freeze" not in request:
        counted = (Unmodelled(frozen.rule.key, Effect.LESS, "frozen parameters, which a search counts as trained"),)
        precision = None if frozen.half else asked.precision  # what is trained is in fp32 then
        asked = asked.replace(freeze_rule=None, precision=precision, unmodelled=(*asked.unmodelled, *counted))
        resolved = resolve_search(asked, plain)
        candidate = _candidate(setup, asked, resolved)
    for technique, _ in techniques_of(candidate.workload):
        if technique.unsearched:
            remedy = "plan it by zeroplan estimate --ds-config FILE, or leave the section out"
            raise BadInput(technique.unsearched, where=technique.where, remedy=remedy)
    engine = candidate.engine or resolved.engine
    memory = Memory(engine, resolved.spec, resolved.cluster, depth=request.depth)
    cost = CostModel(engine, resolved.spec, resolved.cluster, resolved.rates)
    laid_out = _of_layout(setup, candidate)
    current = (
        recommendation(engine, rank_all([candidate], memory, cost)[0], 0, resolved.cluster.layout) if not laid_out else None
    )
    work = candidate.workload
    kept = request.engine if "engine" in request else asked.engine
    ranks = resolved.cluster.layout.dp
    shared = prod(int(setup.degrees.get(name, 1)) for name in ("tp", "cp", "ulysses", "pp"))
    theirs = (setup.ask.global_batch if setup.degrees else None) or work.batch.micro_batch * work.batch.grad_accum * max(
        1, ranks // shared
    )
    batch: int | None = options.global_batch or theirs
    if options.global_batch is None and laid_out and theirs % ranks:
        batch = None
        laid_out.append(
            f"its batch of {theirs} is no multiple of {ranks} data-parallel ranks, and is left open (--global-batch)"
        )
    free = asked.replace(
        micro_batch=request.micro_batch,
        grad_accum=request.grad_accum,
        stage=request.stage,
        offload_optimizer=request.offload_optimizer,
        offload_param=request.offload_param,
        engine=kept,
        ds_config=None,
        dtype=work.numerics.dtype.value,
        optimizer=work.numerics.optimizer,
        optimizer_kind=asked.optimizer_kind if kept == asked.engine else None,
        precision=asked.precision if kept == asked.engine else None,
        alloc_conf=asked.alloc_conf,
        gradient_checkpointing=False,
        checkpoint_policy="full",
        unmodelled=_but_degrees(asked, setup),
        reduce_dtype=asked.value("reduce_dtype") if REDUCED_GRADIENTS.taken_by(find_engine(kept)) else None,
    )
    if "compile" in request:
        free = free.replace(compile=request[CompiledTechnique.compile])
    elif "compile" in asked and not COMPILED.taken_by(find_engine(kept)):
        free = free.replace(compile=None, unmodelled=(*free.unmodelled, COMPILED.without_graphs(setup.key("compile"))))
    if asked[CheckpointingTechnique.checkpoint_policy] != free[CheckpointingTechnique.checkpoint_policy]:
        key = setup.ask.source("checkpoint_policy") or "--checkpoint-policy"
        laid_out.append(f"{key}: what is recomputed is not searched; blocks are, whole, or nothing")
    left_out = (one for one in setup.unmodelled if one.key not in map(setup.key, setup.degrees))
    said = [setup.line, *laid_out, *(f"{one.key}: {one.says}" for one in (*left_out, *counted))]
    notes = (*said, *(text.removeprefix("candidate 0: ") for text in resolved.warnings if text.startswith("candidate")))
    beside = "" if "engine" in request or setup.program not in _OF_BOTH else other_engine(kept)
    found = replace(
        plain, global_batch=batch, notes=notes, training=training_settings(setup), other_engine=beside, program=setup.program
    )
    return free, found, current


#: Programs that run several engines.
_OF_BOTH = ("hf-trainer", "trl", "llama-factory", "axolotl", "accelerate", "lightning", "loop")


def training_settings(setup: Setup) -> Training:
    """Return what the source says of training. A ds_config has the last word, as in its programs; without a norm it clips
    nothing. Source: DeepSpeed 0.19.8, runtime/constants.py (GRADIENT_CLIPPING_DEFAULT).
    """
    if setup.ds_config is None:
        return setup.training
    found = read_training(setup.ds_config, setup.training.file)
    if "gradient_clipping" not in setup.ds_config:
        found = replace(found, values={**found.values, "max_grad_norm": 0.0})
    return found.over(setup.training)


def _but_degrees(asked: Ask, setup: Setup) -> tuple[Unmodelled, ...]:
    """Return what is left out of the figures but for the degrees, which no candidate has."""
    return tuple(one for one in asked.unmodelled if one.key not in map(setup.key, setup.degrees))


def _of_layout(setup: Setup, candidate: Candidate) -> list[str]:
    """Return what to say where the run in use divides the model among ranks; nothing under data parallelism alone."""
    plain = Ask()
    degrees = {name: value for name, value in setup.degrees.items() if value != getattr(plain, name)}
    keys = list(dict.fromkeys(setup.key(name) for name in degrees))
    keys += [one.key for one in candidate.unmodelled if one.key in SHARED_KEYS and one.key not in keys]
    if not keys:
        return []
    text = f"{', '.join(keys)}: the search is of data parallelism alone, and what is in use is not compared"
    kept = {name: value for name, value in degrees.items() if name in FIXED}
    flags = f", zeroplan recommend MODEL {flags_of(kept)} searches layouts that keep to it" if kept else ""
    return [f"{text}; zeroplan estimate --from plans it{flags}"]


_DS_CONFIG = "ds_config: "
#: Keys of a ds_config, by the option that they set.
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
    if error.where in {OPTIONS[name].where for name in changes}:
        return BadInput(error.what, where=f"{name} ({error.where})", remedy=error.remedy)
    return error


def _candidate(setup: Setup, request: Ask, resolved: ResolvedSearch) -> Candidate:
    again = bool(setup.value("gradient_checkpointing"))
    if isinstance(request.ds_config, dict):
        from zeroplan.search.candidates_file import candidate_of

        return candidate_of(request.ds_config, resolved, request, again)
    workload = resolved.workload.checkpointed(again)
    zero = resolved.engine.default()
    if setup.ask.stage is not None:
        zero = ZeroConfig.of(setup.ask.stage, setup.ask.offload_optimizer or "none", setup.ask.offload_param or "none")
    return Candidate(resolved.engine.for_optimizer(zero, workload.numerics.optimizer), workload, request.alloc_conf)
