"""``--from``: what a run in use would need, and the search over everything that its file does not have to decide."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup
from zeroplan.planner.request import Request
from zeroplan.search.answer import Recommendation, recommendation
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.problem import Problem, Wish, problem_of
from zeroplan.search.recommend import rank_all
from zeroplan.search.space import Candidate

#: Fields of a Setup that a Request has under the same name, with the Request's value when nothing was said.
_SHARED = ("model", "micro_batch", "grad_accum", "seq_len", "dtype", "optimizer", "lora_rank")


def inherit(request: Request, wish: Wish) -> tuple[Request, Wish, Recommendation]:
    """The request and the wish with what the source says, and the source's own configuration, predicted.

    The search keeps the source's model, sequence length, precision, optimizer, adapters and global batch, and is free in
    how the batch is split, sharded, offloaded and checkpointed.

    Raises:
        BadInput: a source that cannot be read, lacks a model, or contradicts a flag.
    """
    setup = read_setup(wish.source)
    changes = _said(request, setup)
    try:
        return _inherit(replace(request, **changes), request, wish, setup)
    except BadInput as error:
        raise _in_its_words(error, wish.source, setup, changes) from None


def _inherit(asked: Request, request: Request, wish: Wish, setup: Setup) -> tuple[Request, Wish, Recommendation]:
    if asked.model is None and asked.params is None:
        raise BadInput(f"the {setup.kind} names no model", where="MODEL", remedy="give one before --from")
    plain = replace(wish, source=None, given=None)
    problem = problem_of(replace(asked, engine=setup.engine), plain)
    candidate = _candidate(setup, asked, problem)
    memory = Memory(problem.engine, problem.spec, problem.cluster, depth=request.depth)
    cost = CostModel(problem.engine, problem.spec, problem.cluster, problem.rates)
    current = recommendation(problem.engine, rank_all([candidate], memory, cost)[0], 0, problem.cluster.layout)
    work = candidate.workload
    batch = wish.global_batch or work.micro_batch * work.grad_accum * problem.cluster.layout.dp
    free = replace(
        asked,
        micro_batch=request.micro_batch,
        grad_accum=request.grad_accum,
        dtype=work.dtype.value,
        optimizer=work.optimizer,
        gradient_checkpointing=False,
    )
    notes = (*setup.notes, *(text.removeprefix("candidate 0: ") for text in problem.warnings if text.startswith("candidate")))
    return free, replace(plain, global_batch=batch, notes=notes), current


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


def _in_its_words(error: BadInput, source: Any, setup: Setup, changes: dict[str, Any]) -> BadInput:
    """The same with the file's name, and with its program where it and not a flag said what is wrong."""
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else setup.kind
    if error.where.startswith(_DS_CONFIG):
        key = error.where.removeprefix(_DS_CONFIG)
        inner = name if setup.kind == "ds_config" else f"{name}: its ds_config"
        what = error.what
        if _KEYS.get(key) in changes:
            what = what.replace("the file says", "says").replace("the flags say", f"{setup.kind} has")
        return BadInput(what, where=f"{inner}: {key}", remedy=error.remedy)
    if _FLAGS.get(error.where) in changes:
        return BadInput(error.what, where=f"{name} ({error.where})", remedy=error.remedy)
    return error


def _said(request: Request, setup: Setup) -> dict[str, Any]:
    """What the source says and no flag does, by the Request's fields."""
    changes: dict[str, Any] = {}
    for name in _SHARED:
        said = getattr(setup, name)
        if said is not None and getattr(request, name) is None and not (name == "model" and request.params is not None):
            changes[name] = said
    if setup.lora_targets and not request.lora_targets:
        changes["lora_targets"] = setup.lora_targets
    if setup.attn is not None and request.attn == "sdpa":
        changes["attn"] = setup.attn
    if setup.gpus is not None and request.gpus == 1:
        changes["gpus"] = setup.gpus
    if setup.nodes is not None and request.nodes == 1:
        changes["nodes"] = setup.nodes
    return changes


def _candidate(setup: Setup, request: Request, problem: Problem) -> Candidate:
    again = bool(setup.gradient_checkpointing)
    if setup.ds_config is not None:
        from zeroplan.search.candidates_file import candidate_of

        return candidate_of(dict(setup.ds_config), problem, request, again)
    workload = replace(problem.workload, gradient_checkpointing=again)
    zero = problem.engine.for_optimizer(problem.engine.default(), workload.optimizer)
    return Candidate(zero, workload, request.alloc_conf)
