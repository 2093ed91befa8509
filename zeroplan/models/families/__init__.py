"""The shapes of known architectures: one declarative description per family, keyed by a config's ``model_type``.

Note [Families]
    A family maps a config to units of tensors with the names, the order and the ties of ``named_parameters()`` in
    transformers 5.17. :data:`FAMILIES` says where each is described (its module is imported when first asked for) and
    which auto class people train it with.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from zeroplan.core.model_config import CAUSAL_LM, CLASSIFIERS, IMAGE_CLASSIFICATION, MASKED_LM, SEQ2SEQ_LM, SPEECH_SEQ2SEQ
from zeroplan.core.sizes import LARGEST
from zeroplan.models.families.config import Config
from zeroplan.models.spec import SpecUnit

#: model_type -> (module and function, auto class)
FAMILIES: dict[str, tuple[str, str]] = {
    "llama": ("llama.llama", CAUSAL_LM),
    "mistral": ("llama.mistral", CAUSAL_LM),
    "qwen2": ("llama.qwen2", CAUSAL_LM),
    "qwen3": ("llama.qwen3", CAUSAL_LM),
    "mixtral": ("moe.mixtral", CAUSAL_LM),
    "qwen2_moe": ("moe.qwen2_moe", CAUSAL_LM),
    "qwen3_moe": ("moe.qwen3_moe", CAUSAL_LM),
    "olmoe": ("moe.olmoe", CAUSAL_LM),
    "phimoe": ("moe.phimoe", CAUSAL_LM),
    "deepseek_v2": ("deepseek.deepseek_v2", CAUSAL_LM),
    "deepseek_v3": ("deepseek.deepseek_v3", CAUSAL_LM),
    "gemma": ("gemma.gemma", CAUSAL_LM),
    "gemma2": ("gemma.gemma2", CAUSAL_LM),
    "gemma3_text": ("gemma.gemma3_text", CAUSAL_LM),
    "gemma3": ("gemma.gemma3", CAUSAL_LM),
    "phi": ("phi.phi", CAUSAL_LM),
    "phi3": ("phi.phi3", CAUSAL_LM),
    "olmo": ("llama.olmo", CAUSAL_LM),
    "olmo2": ("llama.olmo2", CAUSAL_LM),
    "olmo3": ("llama.olmo2", CAUSAL_LM),
    "gpt2": ("gpt.gpt2", CAUSAL_LM),
    "gptj": ("gpt.gptj", CAUSAL_LM),
    "gpt_neox": ("gpt.gpt_neox", CAUSAL_LM),
    "opt": ("gpt.opt", CAUSAL_LM),
    "bloom": ("falcon.bloom", CAUSAL_LM),
    "falcon": ("falcon.falcon", CAUSAL_LM),
    "bert": ("bert.bert", MASKED_LM),
    "roberta": ("bert.roberta", MASKED_LM),
    "modernbert": ("bert.modernbert", MASKED_LM),
    "deberta": ("deberta.deberta", MASKED_LM),
    "deberta-v2": ("deberta.deberta_v2", MASKED_LM),
    "t5": ("t5.t5", SEQ2SEQ_LM),
    "vit": ("vit.vit", IMAGE_CLASSIFICATION),
    "whisper": ("whisper.whisper", SPEECH_SEQ2SEQ),
    "megatron_gpt": ("megatron.megatron_gpt", CAUSAL_LM),
}


def units_of(config: Config, model_type: str, auto_class: str = "") -> tuple[SpecUnit, ...]:
    """The units of a known architecture.

    Args:
        config: its config, checked as it is read.
        model_type: a key of :data:`FAMILIES`.
        auto_class: the class whose head it has; empty for the family's own.

    Raises:
        BadInput: when the config lacks a key, or a value has the wrong type or is out of range.
        NotDescribedError: when the family is not described with that head.
    """
    module, function = FAMILIES[model_type][0].split(".")
    describe = cast(
        "Callable[[Config], tuple[SpecUnit, ...]]", getattr(import_module(f"zeroplan.models.families.{module}"), function)
    )
    found = describe(config)
    if auto_class in CLASSIFIERS:
        from zeroplan.models.families.heads import with_classifier

        found = with_classifier(config, model_type, auto_class, found)
    if sum(unit.numel * unit.count for unit in found) > LARGEST:
        raise config.bad("describes more parameters than any machine could hold")
    return found
