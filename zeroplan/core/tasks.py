"""Tasks that a model is trained for, which decide its head: by the names that transformers' pipelines use."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from zeroplan.core.errors import member_named


class Task(StrEnum):
    """A head and its loss."""

    CAUSAL_LM = "causal-lm"
    MASKED_LM = "masked-lm"
    SEQ2SEQ = "seq2seq"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    IMAGE_CLASSIFICATION = "image-classification"


#: How the names of architectures with a task's head end.
_ENDINGS = {
    Task.CAUSAL_LM: "ForCausalLM",
    Task.MASKED_LM: "ForMaskedLM",
    Task.SEQ2SEQ: "ForConditionalGeneration",
    Task.SEQUENCE_CLASSIFICATION: "ForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "ForTokenClassification",
    Task.QUESTION_ANSWERING: "ForQuestionAnswering",
    Task.IMAGE_CLASSIFICATION: "ForImageClassification",
}


#: What a run does with a language model, by the names that programs' files have for it.
TRAININGS = frozenset(
    (
        *("pretrain", "sft", "dpo", "ipo", "kto", "reward", "grpo", "rloo", "ppo", "orpo", "cpo", "simpo", "bco", "gkd"),
        "distillation",
    )
)


def training_of(task: str | None) -> str | None:
    """Return what a run does by ``--task``; None where the flag names a head, or nothing."""
    plain = (task or "").strip().lower()
    return plain if plain in TRAININGS else None


def parse_task(text: str) -> Task:
    """Return the task of a name, with ``-`` or ``_``. Raises BadInput: an unknown name."""
    return member_named(Task, text.replace("_", "-"), where="--task", fault="unknown task {}")


def with_task(config: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Return the config of the same model with the task's head."""
    return {**config, "architectures": [_ENDINGS[task]]}
