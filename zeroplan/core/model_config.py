"""A model's ``config.json`` read before anything is built from it: its text model, and the class that trains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the text model; the config itself where there is only one model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


#: transformers' auto classes by what they train.
CAUSAL_LM = "AutoModelForCausalLM"
MASKED_LM = "AutoModelForMaskedLM"
SEQ2SEQ_LM = "AutoModelForSeq2SeqLM"
SPEECH_SEQ2SEQ = "AutoModelForSpeechSeq2Seq"
IMAGE_CLASSIFICATION = "AutoModelForImageClassification"
IMAGE_TEXT_TO_TEXT = "AutoModelForImageTextToText"
SEQUENCE_CLASSIFICATION = "AutoModelForSequenceClassification"
TOKEN_CLASSIFICATION = "AutoModelForTokenClassification"
QUESTION_ANSWERING = "AutoModelForQuestionAnswering"
CTC = "AutoModelForCTC"
AUDIO_CLASSIFICATION = "AutoModelForAudioClassification"
MULTIPLE_CHOICE = "AutoModelForMultipleChoice"
#: Auto classes of models without a head, which return no loss.
HEADLESS = ("AutoModel", "AutoModelForTextEncoding")
#: Auto classes whose head takes the place of the language model's.
CLASSIFIERS = (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, QUESTION_ANSWERING)

#: transformers' auto classes by how an architecture's name ends; the first that matches.
_AUTO_CLASSES = (
    ("ForCausalLM", CAUSAL_LM),
    ("LMHeadModel", CAUSAL_LM),
    ("ForMaskedLM", MASKED_LM),
    ("ForImageClassification", IMAGE_CLASSIFICATION),
    ("ForSequenceClassification", SEQUENCE_CLASSIFICATION),
    ("ForTokenClassification", TOKEN_CLASSIFICATION),
    ("ForQuestionAnswering", QUESTION_ANSWERING),
    ("WhisperForConditionalGeneration", SPEECH_SEQ2SEQ),
    ("Gemma3ForConditionalGeneration", IMAGE_TEXT_TO_TEXT),
    ("ForConditionalGeneration", SEQ2SEQ_LM),
    ("ForConditionalGeneration", IMAGE_TEXT_TO_TEXT),
    ("ForConditionalGeneration", SPEECH_SEQ2SEQ),
)
_AUTO_CLASS_OF_TYPE = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta", "deberta-v2", "modernbert", "albert"),
        MASKED_LM,
    ),
    **dict.fromkeys(("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "longt5"), SEQ2SEQ_LM),
    "whisper": SPEECH_SEQ2SEQ,
    **dict.fromkeys(("vit", "deit", "beit", "swin", "convnext", "dinov2"), IMAGE_CLASSIFICATION),
}


def architectures_of(config: Mapping[Any, Any]) -> tuple[str, ...]:
    """The class names that a config's ``architectures`` hold."""
    names = config.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list | tuple) else ()


def auto_class_of(config: Mapping[str, Any]) -> str:
    """The auto class that trains a config's architecture; causal language modelling where it does not say."""
    return next(iter(auto_classes_of(config)), CAUSAL_LM)


def auto_classes_of(config: Mapping[str, Any]) -> Iterator[str]:
    """The auto classes that may train a config's architecture, likeliest first: by its architectures, then by its type."""
    for name in architectures_of(config):
        yield from (auto for suffix, auto in _AUTO_CLASSES if name.endswith(suffix))
    of_type = _AUTO_CLASS_OF_TYPE.get(str(config.get("model_type")))
    if of_type is not None:
        yield of_type


def labels_of(config: Mapping[str, Any]) -> int:
    """The number of labels that a classifier's head tells apart; transformers' default is 2."""
    for key in ("id2label", "num_labels"):
        value = config.get(key)
        if isinstance(value, Mapping):
            return len(value) or 2
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 2
