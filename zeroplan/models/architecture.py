"""Which head a config's ``architectures`` name: the family's own, a classifier's, another of transformers', or a drafter's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import CLASSIFIERS, IMAGE_TEXT_TO_TEXT, architectures_of, auto_classes_of
from zeroplan.models.families import FAMILIES
from zeroplan.models.families.config import NotDescribedError

#: Words in the class names of drafters: small models that guess another model's next tokens, and take its hidden states.
_DRAFTERS = re.compile("eagle|medusa|draft|nextn|speculat|hydra|dflash|dspark|mtp", re.IGNORECASE)
#: Config keys that only drafters have.
_DRAFTER_KEYS = ("draft_vocab_size", "eagle_config", "dflash_config", "speculators_model_type", "medusa_num_heads")


def refuse_drafters(config: Mapping[Any, Any], where: str) -> None:
    """Raise BadInput for a drafter: its ``model_type`` is often that of the model that it drafts for, its layers are not."""
    named = next((name for name in architectures_of(config) if _DRAFTERS.search(name)), None)
    key = next((key for key in _DRAFTER_KEYS if config.get(key) is not None), None)
    if named is None and key is None:
        return
    what = f"architecture {named[:60]!r}" if named is not None else f"a config with {key!r}"
    raise BadInput(
        f"{what} is a draft model for speculative decoding, whose layers follow from no config of transformers",
        where=where,
        remedy="give the module itself with a batch, estimate(module, inputs=...), or --params",
    )


def described_head(config: Mapping[Any, Any], model_type: str) -> str:
    """Return the auto class of the head that a described family is to have.

    Raises:
        NotDescribedError: when ``architectures`` name another class, such as ``BertModel`` or ``RobertaForCausalLM``.
    """
    own = FAMILIES[model_type][1]
    heads = list(auto_classes_of({"architectures": architectures_of(config)}))
    if not architectures_of(config) or own in heads or (model_type == "gemma3" and IMAGE_TEXT_TO_TEXT in heads):
        return own
    if heads and heads[0] in CLASSIFIERS:
        return heads[0]
    raise NotDescribedError(architectures_of(config)[0])
