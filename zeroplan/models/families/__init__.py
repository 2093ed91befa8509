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

from zeroplan.core.model_config import CLASSIFIERS
from zeroplan.core.units import LARGEST
from zeroplan.models.families.config import Config
from zeroplan.models.spec import Unit

CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
SEQ2SEQ, SPEECH, IMAGE = "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForImageClassification"

#: model_type -> (module and function, auto class)
FAMILIES: dict[str, tuple[str, str]] = {
    "llama": ("llama.llama", CAUSAL),
    "mistral": ("llama.mistral", CAUSAL),
    "qwen2": ("qwen.qwen2", CAUSAL),
    "qwen3": ("qwen.qwen3", CAUSAL),
    "mixtral": ("moe.mixtral", CAUSAL),
    "qwen2_moe": ("moe.qwen2_moe", CAUSAL),
    "qwen3_moe": ("moe.qwen3_moe", CAUSAL),
    "olmoe": ("moe.olmoe", CAUSAL),
    "phimoe": ("moe.phimoe", CAUSAL),
    "deepseek_v2": ("deepseek.deepseek_v2", CAUSAL),
    "deepseek_v3": ("deepseek.deepseek_v3", CAUSAL),
    "gemma": ("gemma.gemma", CAUSAL),
    "gemma2": ("gemma.gemma2", CAUSAL),
    "gemma3_text": ("gemma.gemma3_text", CAUSAL),
    "gemma3": ("gemma.gemma3", CAUSAL),
    "phi": ("phi.phi", CAUSAL),
    "phi3": ("phi.phi3", CAUSAL),
    "olmo": ("olmo.olmo", CAUSAL),
    "olmo2": ("olmo.olmo2", CAUSAL),
    "olmo3": ("olmo.olmo2", CAUSAL),
    "gpt2": ("gpt.gpt2", CAUSAL),
    "gptj": ("gpt.gptj", CAUSAL),
    "gpt_neox": ("gpt.gpt_neox", CAUSAL),
    "mingpt": ("gpt.mingpt", ""),
    "opt": ("opt.opt", CAUSAL),
    "bloom": ("falcon.bloom", CAUSAL),
    "falcon": ("falcon.falcon", CAUSAL),
    "bert": ("bert.bert", MASKED),
    "roberta": ("bert.roberta", MASKED),
    "modernbert": ("bert.modernbert", MASKED),
    "deberta": ("deberta.deberta", MASKED),
    "deberta-v2": ("deberta.deberta_v2", MASKED),
    "t5": ("t5.t5", SEQ2SEQ),
    "vit": ("vit.vit", IMAGE),
    "whisper": ("whisper.whisper", SPEECH),
}


def units_of(config: Config, model_type: str, auto_class: str = "") -> tuple[Unit, ...]:
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
        "Callable[[Config], tuple[Unit, ...]]", getattr(import_module(f"zeroplan.models.families.{module}"), function)
    )
    found = describe(config)
    if auto_class in CLASSIFIERS:
        from zeroplan.models.families.heads import with_classifier

        found = with_classifier(config, model_type, auto_class, found)
    if sum(unit.numel * unit.count for unit in found) > LARGEST:
        raise config.bad("describes more parameters than any machine could hold")
    return found
