"""The search's own options beside the request, and both resolved: model, cluster, engine, rates and the candidates."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput, member_named
from zeroplan.core.rates import Rates
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.workload import Compilation, DType, Workload
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.interop.training import NO_TRAINING, Training
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.formula import FORMULA
from zeroplan.planner.options import MachineOptions, MeshArguments
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import NoTapeError, expanded_tape_of
from zeroplan.run.ask import Ask
from zeroplan.search.machine_rates import machine_rates
from zeroplan.search.policy import SHOWN
from zeroplan.search.space import NVME_PATH, Candidate, all_candidates, batch_splits
from zeroplan.techniques.compiled import CompiledTechnique

GOALS = ("throughput", "memory")
#: The value of ``--compile`` that searches with compiled blocks and without.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of the search beside the :class:`~zeroplan.run.ask.Ask`.

    Attributes:
        global_batch: sequences an optimizer step; None keeps accumulation at 1 and lets the batch follow.
        goal: throughput, or memory: the least on the GPU.
        gradient_checkpointing: whether blocks are checkpointed; None lets the search choose.
        candidates: the configurations to rank in place of the search's own, or the path of the file that holds them.
        source: the run in use that the answer compares with: a path, a dict or TrainingArguments, or several of them
            (interop/readers.py).
        program: the program that owns `source`; None finds it out.
        profile: the path of measured rates; None takes the user's own profile where it is of this GPU.
        nvme_path: the folder for swap files.
        shown: configurations that the answer holds at most, one of each stage, offload and checkpointing.
        explain: whether the answer gives reasons.
        notes: warnings that the answer repeats.
        training: what the source says of training, beside what a plan holds.
        layouts: whether degrees of parallelism are searched, too (search/layouts.py).
        smallest: whether they are, on the fewest nodes.
        other_engine: an engine that is searched, too, to say what it gains over the request's.
    """

    global_batch: int | None = None
    goal: str = "throughput"
    gradient_checkpointing: bool | None = None
    candidates: Sequence[Candidate] | str | None = None
    source: Any = None
    program: str | None = None
    profile: str | os.PathLike[str] | None = None
    nvme_path: str = NVME_PATH
    shown: int = SHOWN
    explain: bool = True
    notes: tuple[str, ...] = ()
    training: Training = NO_TRAINING
    layouts: bool = False
    smallest: bool = False
    other_engine: str = ""


class RecommendOptions(MachineOptions, MeshArguments, total=False):
    """The keyword arguments of ``recommend``: what it finds out itself may be fixed; else :class:`SearchOptions`.

    `layouts`, `smallest` and any degree of parallelism ask for a search over layouts.
    """

    stage: int | None
    layouts: bool
    smallest: bool
    gradient_checkpointing: bool | None
    set_to_none: bool
    fp8: str | None
    compile: str | None
    global_batch: int | None
    goal: str
    candidates: Sequence[Candidate] | str | None
    source: Any
    program: str | None
    profile: str | os.PathLike[str] | None
    nvme_path: str
    shown: int
    explain: bool
    notes: tuple[str, ...]
    tokens: int | str | None
    price: float | str | None


@dataclass(frozen=True, slots=True)
class ResolvedSearch:
    """A request with everything that a search needs: the model, its workload, the cluster, the engine and the rates.

    Attributes:
        compilations: what the candidates compile; None for nothing.
    """

    spec: ModelSpec
    workload: Workload
    cluster: Cluster
    engine: Engine
    rates: Rates
    warnings: list[str] = field(default_factory=list)
    unmodelled: tuple[Unmodelled, ...] = ()
    compilations: tuple[Compilation | None, ...] = (None,)


def resolve_search(request: Ask, options: SearchOptions) -> ResolvedSearch:
    """Resolve a request for a search; assumptions that this takes become warnings.

    Raises:
        BadInput: a value that cannot be used.
    """
    if options.goal not in GOALS:
        raise BadInput(f"unknown goal {options.goal[:40]!r}", where="--goal", remedy=f"use one of {', '.join(GOALS)}")
    free = request.replace(stage=None, offload_optimizer=None, offload_param=None, ds_config=None)
    said = request[CompiledTechnique.compile]
    compiled = None if said is None else _compilation(said)
    if compiled == AUTO:
        free = free.replace(compile=Compilation.BLOCKS.value)
    elif compiled is Compilation.CHECKPOINTED:
        if options.gradient_checkpointing is False:
            what = "the checkpoints of checkpointed-blocks are those of gradient checkpointing, which is off"
            raise BadInput(what, where="--compile", remedy="use blocks, or let the search checkpoint")
        free = free.replace(gradient_checkpointing=True)
    resolved = resolve(free)
    # What is to be said of single cases is said of those that the answer shows.
    remarks = {resolved.engine.remark(case) for case in resolved.cases}
    cluster, warnings = resolved.cluster, [text for text in resolved.warnings if text not in remarks]
    if cluster.vram is None and options.candidates is None:
        raise BadInput("no GPU is named", where="the machine", remedy="give --vram 24G, or a card: --gpu A100-80G")
    spec, workload = resolved.spec, resolved.workload
    if spec.own_experts is not None:
        raise BadInput(
            "step times of DeepSpeed's MoE layers, which exchange tokens, are not modelled",
            where="model",
            remedy="plan the module with estimate",
        )
    if request.dtype is None and not cluster.gpu.bf16 and workload.numerics.dtype is DType.BF16:
        workload = workload.but(dtype=DType.FP16)
        warnings.append(f"{cluster.gpu.name} has no bf16: fp16 is used; give --dtype fp32 for full precision")
    rates = machine_rates(cluster, options.profile, warnings)
    if request.gpu is None:
        warnings.append(f"speeds are those of an {cluster.gpu.name}; name the card by --gpu")
    compilations: tuple[Compilation | None, ...] = (workload.compile,)
    if workload.compile is not None:
        compilations = _compilations(request, replace(resolved.cases[0], workload=workload), resolved.engine, warnings)
        workload = workload.compiled(compilations[0])
    return ResolvedSearch(spec, workload, cluster, resolved.engine, rates, warnings, resolved.unmodelled, compilations)


def _compilations(request: Ask, case: Case, engine: Engine, warnings: list[str]) -> tuple[Compilation | None, ...]:
    """What candidates compile: what is asked for; for ``auto`` nothing, or blocks where they can be traced.

    Raises:
        BadInput: without a tape, whose kernels tell what a compiled step takes.
    """
    if request.depth == FORMULA or not case.spec.config:
        where = "at formula depth" if request.depth == FORMULA else "of a bare count"
        raise BadInput(f"no compiled graph is known {where}", where="--compile", remedy="leave it out, or name the model")
    if request[CompiledTechnique.compile] == AUTO:
        try:
            expanded_tape_of(engine, case)
        except NoTapeError as error:
            warnings.append(f"nothing is compiled: {error}")
            return (None,)
    warnings.append("compilation itself takes a minute or more before the first steps, which no time here holds")
    return (None, case.workload.compile) if request[CompiledTechnique.compile] == AUTO else (case.workload.compile,)


def _compilation(text: str) -> Compilation | str:
    """Return what is compiled, or :data:`AUTO`. Raises BadInput: another word."""
    if text == AUTO:
        return AUTO
    names = [*Compilation, AUTO]
    return member_named(Compilation, text, where="--compile", names=names)


def candidates_of(resolved: ResolvedSearch, request: Ask, options: SearchOptions) -> list[Candidate]:
    """Return every candidate that the request and the options leave open.

    Raises:
        BadInput: batch arithmetic that cannot work out, or a stage and offload that no option has.
    """
    zeros = [
        (resolved.engine.for_optimizer(zero, resolved.workload.numerics.optimizer), effort)
        for zero, effort in resolved.engine.search_space(resolved.cluster, options.nvme_path)
        if (request.stage is None or zero.stage == request.stage)
        and (request.offload_optimizer is None or zero.offload_optimizer.device == request.offload_optimizer)
        and (request.offload_param is None or zero.offload_param.device == request.offload_param)
    ]
    if not zeros:
        raise BadInput(
            "no configuration has this stage and offload", where="--stage", remedy="leave one of the flags out, or give --nvme"
        )
    splits = batch_splits(
        options.global_batch, resolved.cluster.layout, micro_batch=request.micro_batch, grad_accum=request.grad_accum
    )
    again = (False, True) if options.gradient_checkpointing is None else (options.gradient_checkpointing,)
    if resolved.compilations == (Compilation.CHECKPOINTED,):
        again = (True,)
    confs = (request.alloc_conf,) if request.alloc_conf else resolved.engine.alloc_confs
    left_out, compiled = resolved.unmodelled, resolved.compilations
    return list(all_candidates(zeros, resolved.workload, splits, again, confs, left_out, compiled))
