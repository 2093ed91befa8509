"""Training on preferences: what TRL's trainers pass through the model in one step, beside plain samples.

Source: TRL 1.16, ``trainer/dpo_trainer.py``, ``trainer/kto_trainer.py``, ``trainer/reward_trainer.py``,
``experimental/orpo/orpo_trainer.py``, ``experimental/cpo/cpo_trainer.py``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from zeroplan.core.tasks import Task


class PairLoss(StrEnum):
    """A loss over the whole logits of chosen and rejected samples that passed together.

    It compares the log-probabilities that both samples have. RANKING_AND_NLL adds the cross entropy of the chosen ones: ORPO,
    and CPO and SimPO unless ``cpo_alpha`` is 0. SOFTMAX takes them from a log-softmax of all logits, in fp32, as LLaMA-Factory
    does for each of its losses.
    """

    RANKING = "ranking"
    RANKING_AND_NLL = "ranking+nll"
    SOFTMAX = "softmax"


#: Tasks whose step is one forward and backward of one model.
PLAIN_TASKS = ("pretrain", "sft")
#: Tasks that are planned from flags alone, as TRL's trainers run them with their defaults.
PLANNED = ("dpo", "ipo", "kto", "orpo", "cpo", "simpo", "reward")


def passes_of(task: str, *, adapters: bool) -> dict[str, Any]:
    """Return what TRL's trainer passes through the model in a step of `task`, as options of a run.

    Args:
        task: one of :data:`PLANNED`.
        adapters: whether the model without its adapters is the reference.
    """
    reference = "base" if adapters else "model"
    if task in ("dpo", "ipo"):
        return {"pairs": True, "chunked_head": True, "reference": reference}
    if task == "kto":
        return {"kl_batch": True, "chunked_head": True, "reference": reference}
    if task == "reward":
        return {"pairs": True, "head": Task.SEQUENCE_CLASSIFICATION.value}
    return {"pairs": True, "pair_loss": PairLoss.RANKING_AND_NLL.value}
