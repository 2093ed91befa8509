"""A model's ``config.json`` read before anything is built from it: its text model, and the class that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the text model; the config itself where there is only one model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


#: transformers' auto classes by how an architecture's name ends; the first that matches.
_AUTO_CLASSES = (
    ("ForCausalLM", "AutoModelForCausalLM"),
    ("LMHeadModel", "AutoModelForCausalLM"),
    ("ForMaskedLM", "AutoModelForMaskedLM"),
    ("ForImageClassification", "AutoModelForImageClassification"),
    ("ForSequenceClassification", "AutoModelForSequenceClassification"),
    ("WhisperForConditionalGeneration", "AutoModelForSpeechSeq2Seq"),
    ("Gemma3ForConditionalGeneration", "AutoModelForImageTextToText"),
    ("ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
)
_AUTO_CLASS_OF_TYPE = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta", "deberta-v2", "modernbert", "albert"),
        "AutoModelForMaskedLM",
    ),
    **dict.fromkeys(("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "longt5"), "AutoModelForSeq2SeqLM"),
    "whisper": "AutoModelForSpeechSeq2Seq",
    **dict.fromkeys(("vit", "deit", "beit", "swin", "convnext", "dinov2"), "AutoModelForImageClassification"),
}


def auto_class_of(config: Mapping[str, Any]) -> str:
    """The auto class that trains a config's architecture; causal language modelling where it does not say."""
    architectures = config.get("architectures")
    if isinstance(architectures, (list, tuple)):
        for name in architectures:
            for suffix, auto in _AUTO_CLASSES:
                if isinstance(name, str) and name.endswith(suffix):
                    return auto
    return _AUTO_CLASS_OF_TYPE.get(str(config.get("model_type")), "AutoModelForCausalLM")
