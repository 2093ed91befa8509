"""``--task`` where it names a way of training and no file says more: what TRL's trainer passes through the model by default."""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.preferences import PLAIN_TASKS, PLANNED, PairLoss, passes_of
from zeroplan.core.tasks import training_of
from zeroplan.core.workload import Reference
from zeroplan.run.ask import Ask


def with_training_task(request: Ask) -> Ask:
    """Return the request with what its task passes through the model; as it is where ``--task`` names a head, or nothing.

    Raises:
        BadInput: a task whose step is not modelled.
    """
    task = training_of(request.task)
    if task is None:
        return request
    if task in PLAIN_TASKS:
        return request.replace(task=None)
    if task not in PLANNED:
        raise BadInput(
            f"a step of {task} is not modelled: it generates, or asks further models",
            where="--task",
            remedy=f"use one of {', '.join((*PLANNED, *PLAIN_TASKS))}, or give the run's file by --from",
        )
    passes = passes_of(task, adapters=request.lora_rank is not None)
    if "pair_loss" in passes:
        passes["pair_loss"] = PairLoss(passes["pair_loss"])
    if "reference" in passes:
        passes["reference"] = Reference(passes["reference"])
    return request.replace(task=passes.pop("head", None), **passes)
