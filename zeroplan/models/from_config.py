"""A ModelSpec from a config: by the family's description, or through transformers' meta device when it is unknown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.model_config import CLASSIFIERS, IMAGE_TEXT_TO_TEXT, architectures_of, auto_classes_of
from zeroplan.models.families import FAMILIES, units_of
from zeroplan.models.families.config import Config, NotDescribedError
from zeroplan.models.spec import ModelSpec

#: Keys of configs that count the experts of a block.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def describable(config: Mapping[Any, Any]) -> bool:
    """Return whether the config alone gives the shapes here: its family is described, or transformers is installed."""
    model_type = config.get("model_type")
    return (isinstance(model_type, str) and model_type in FAMILIES) or _transformers_installed()


def _transformers_installed() -> bool:
    return find_spec("transformers") is not None and find_spec("torch") is not None


def _require_enough_experts(config: Mapping[Any, Any], where: str) -> None:
    """Refuse a mixture whose tokens take more experts than a block has, which no router runs."""
    taken = config.get("num_experts_per_tok")
    for key in _EXPERTS:
        experts = config.get(key)
        if type(taken) is int and type(experts) is int and 0 < experts < taken:
            raise BadInput(
                f"'num_experts_per_tok' {taken:,} is more than {key!r} {experts:,}", where=where, remedy="lower the first"
            )


def spec_from_config(
    config: Mapping[Any, Any],
    *,
    name: str,
    source: str,
    where: str = "config",
    trust_remote_code: bool = False,
    repository: str | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> ModelSpec:
    """Describe the parameters of a config's model.

    Args:
        config: the contents of a ``config.json``.
        name: what to call the model.
        source: where the config came from, for :attr:`ModelSpec.source`.
        where: the file, flag or argument to name in messages.
        trust_remote_code: whether code that comes with an unknown architecture may be run.
        repository: the hub id or folder where that code lies.
        revision: of that repository.
        token: for that repository.

    Raises:
        BadInput: when the config lacks a key, holds a value of the wrong type or out of range, or names an architecture
            that neither zeroplan nor the installed transformers knows.
    """
    reader = Config(config, where)
    model_type = reader.text("model_type")
    if not model_type:
        raise BadInput("has no model_type", where=where, remedy="give the config.json that transformers writes")
    refuse_drafters(config, where)
    _require_enough_experts(config, where)
    if model_type in FAMILIES:
        try:
            auto_class = described_head(config, model_type)
            units = units_of(reader, model_type, auto_class)
            return ModelSpec(name, units, source, model_type, dict(config), auto_class=auto_class)
        except NotDescribedError:
            pass  # a rare variant or another head: transformers describes it below, where it is installed
    if not _transformers_installed():
        near = did_you_mean(model_type, FAMILIES)
        install = "pip install 'zeroplan[torch]' to let transformers describe it"
        if model_type in FAMILIES and architectures_of(config):
            raise BadInput(
                f"zeroplan itself describes no {architectures_of(config)[0][:60]!r} of model_type {model_type!r}",
                where=where,
                remedy=install,
            )
        raise BadInput(
            f"model_type {model_type!r} with this config is not of the families that zeroplan describes itself",
            where=where,
            remedy=f"{near} or {install}" if near else install,
        )
    from zeroplan.models.live import units_from_module
    from zeroplan.trace.meta import build_on_meta

    module, auto_class = build_on_meta(
        config, where=where, repository=repository, revision=revision, token=token, trust_remote_code=trust_remote_code
    )
    return ModelSpec(name, units_from_module(module), source, model_type, dict(config), auto_class=auto_class)


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
