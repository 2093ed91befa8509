"""Heads of classifiers in place of a language model's: one label a sequence, one a token, or the begin and end of an answer.

Source: transformers 5.17 ``modeling_layers.py`` (``GenericForSequenceClassification``, ``GenericForTokenClassification``),
``modeling_bert.py``, ``modeling_roberta.py``, ``modeling_deberta.py``, ``modeling_deberta_v2.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from zeroplan.core.model_config import QUESTION_ANSWERING, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, labels_of
from zeroplan.models.families.config import Config, NotDescribedError
from zeroplan.models.families.layers import linear, unit, units
from zeroplan.models.spec import SpecUnit

_Head = Callable[[Config, str, int, int], tuple[SpecUnit, ...]]

#: Units that a classifier does not have.
_LM_HEADS = ("lm_head", "cls.predictions")
#: Families whose classifiers are transformers' generic ones.
GENERIC = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "phi", "phi3")
)


def _generic(c: Config, auto_class: str, hidden: int, labels: int) -> tuple[SpecUnit, ...]:
    if auto_class == QUESTION_ANSWERING:
        raise NotDescribedError(auto_class)  # the base model has another name in some families
    return unit("score", linear("", hidden, labels, bias=auto_class == TOKEN_CLASSIFICATION))


def _bert(c: Config, auto_class: str, hidden: int, labels: int) -> tuple[SpecUnit, ...]:
    if auto_class == QUESTION_ANSWERING:
        return unit("qa_outputs", linear("", hidden, labels, bias=True))
    pooled = auto_class == SEQUENCE_CLASSIFICATION
    return units(
        unit("bert.pooler", linear("dense", hidden, hidden, True)) if pooled else (),
        unit("classifier", linear("", hidden, labels, True)),
    )


def _roberta(c: Config, auto_class: str, hidden: int, labels: int) -> tuple[SpecUnit, ...]:
    if auto_class == SEQUENCE_CLASSIFICATION:
        return unit("classifier", linear("dense", hidden, hidden, True), linear("out_proj", hidden, labels, True))
    return unit("qa_outputs" if auto_class == QUESTION_ANSWERING else "classifier", linear("", hidden, labels, True))


def _deberta(c: Config, auto_class: str, hidden: int, labels: int) -> tuple[SpecUnit, ...]:
    if auto_class == SEQUENCE_CLASSIFICATION:
        width = c.size("pooler_hidden_size", default=hidden)
        if width != hidden:
            raise NotDescribedError("pooler_hidden_size")
        return units(unit("pooler", linear("dense", width, width, True)), unit("classifier", linear("", width, labels, True)))
    return unit("qa_outputs" if auto_class == QUESTION_ANSWERING else "classifier", linear("", hidden, labels, True))


_HEADS: dict[str, _Head] = {
    **dict.fromkeys(GENERIC, _generic),
    "bert": _bert,
    "roberta": _roberta,
    "deberta": _deberta,
    "deberta-v2": _deberta,
}


def with_classifier(c: Config, model_type: str, auto_class: str, described: tuple[SpecUnit, ...]) -> tuple[SpecUnit, ...]:
    """The family's units with a classifier's head in place of the language model's.

    Raises:
        NotDescribedError: a family whose classifiers are not described here.
    """
    head = _HEADS.get(model_type)
    kept = tuple(one for one in described if one.name not in _LM_HEADS)
    dropped = [one for one in described if one.name in _LM_HEADS]
    if head is None or not dropped:
        raise NotDescribedError(auto_class)
    hidden = next(t.shape[1] for t in dropped[0].tensors if len(t.shape) == 2)  # the first matrix takes the last block's output
    return units(kept, head(c, auto_class, hidden, labels_of(c.data)))
