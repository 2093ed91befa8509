"""Models with random weights, built from the catalog's configs: memory does not depend on weights.

A spec's ``model_overrides`` changes single values, so that a model of real widths and few layers can be recorded event by
event.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure.spec import Spec

#: For a machine without a GPU.
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32768,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
#: Vision-language models as published, where the catalog has them not.
VISION: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2-VL-2B-Instruct": {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "text_config": {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "rope_parameters": _MROPE,
        },
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "num_heads": 16},
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-VL-3B-Instruct": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "rope_parameters": _MROPE,
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-VL-2B-Instruct": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rope_parameters": {**_MROPE, "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        "tie_word_embeddings": True,
    },
}
#: Further families of transformers, with the values of their published configs; what a config leaves out is the class' default.
FURTHER: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("further.json").read_text())
#: What training needs and the catalog, which is about shapes, leaves out; by model type.
_TOKENS: dict[str, dict[str, Any]] = {"t5": {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}}

AUTO_CLASS: dict[str, str] = {
    "roberta": "AutoModelForMaskedLM",
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "modernbert": "AutoModelForMaskedLM",
    "deberta-v2": "AutoModelForMaskedLM",
    "deberta": "AutoModelForMaskedLM",
    "distilbert": "AutoModelForMaskedLM",
    "albert": "AutoModelForMaskedLM",
    "xlm-roberta": "AutoModelForMaskedLM",
    "electra": "AutoModelForMaskedLM",
    "bart": "AutoModelForSeq2SeqLM",
    "whisper": "AutoModelForSpeechSeq2Seq",
    "vit": "AutoModelForImageClassification",
}
"""``model_type`` to the transformers auto class that gives a loss; all others are causal."""


#: A model's name begins so where it is a class of transformers, whose model type is in ``model_overrides``.
CLASS = "class/"


def build_config(name: str, overrides: dict[str, Any]) -> Any:
    """Return the transformers config of ``name`` with single values replaced."""
    from transformers import AutoConfig

    from zeroplan.models.catalog import find

    if name.startswith(CLASS):
        values = {key: value for key, value in overrides.items() if key != "model_type"}
        return AutoConfig.for_model(overrides["model_type"], **values)
    entry = find(name)
    known = TINY if name == "tiny/llama" else dict(entry.config) if entry else VISION.get(name) or FURTHER.get(name, {})
    if not known:
        raise ValueError(f"no config values are known for {name}")
    values = known | _TOKENS.get(known["model_type"], {}) | overrides
    return AutoConfig.for_model(values["model_type"], **{k: v for k, v in values.items() if k != "model_type"})


#: A task's auto class, by the names of ``--task``.
TASKS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "image-text-to-text": "AutoModelForImageTextToText",
    "multimodal": "AutoModelForMultimodalLM",
}


def auto_class(model_type: str, task: str | None = None) -> Any:
    """Return the transformers auto class whose ``from_config`` builds this type with a loss."""
    import transformers

    return getattr(transformers, TASKS[task] if task else AUTO_CLASS.get(model_type, "AutoModelForCausalLM"))


def media_batch(spec: Spec, dtype: Any, device: Any) -> dict[str, Any]:
    """Return one micro batch of the spec's samples, each with its images, videos and sound."""
    import torch

    from zeroplan.core.workload import Media
    from zeroplan.trace.media import media_inputs, media_of

    config = build_config(spec.model, spec.model_overrides)
    with torch.device("meta"):
        model = auto_class(config.model_type, spec.task).from_config(config)
    media = media_of(model, config.to_dict(), Media(spec.images, spec.image_size, spec.video_frames, spec.audio_seconds))
    made = media_inputs(media, spec.micro_batch, spec.seq_len, dtype)
    return {name: tensor.to(device) for name, tensor in made.items()}


def other_batch(spec: Spec, dtype: Any, device: Any) -> dict[str, Any] | None:
    """Return one micro batch of a model that takes no tokens: pictures, or the spectrograms of 30 s of sound; else None."""
    import torch

    config = build_config(spec.model, spec.model_overrides)
    if config.model_type == "vit":
        size = (spec.micro_batch, config.num_channels, config.image_size, config.image_size)
        classes = torch.zeros(spec.micro_batch, dtype=torch.int64, device=device)
        return {"pixel_values": torch.randn(size, dtype=dtype, device=device), "labels": classes}
    if config.model_type == "whisper":
        frames = (spec.micro_batch, config.num_mel_bins, 2 * config.max_source_positions)
        tokens = torch.randint(3, 30000, (spec.micro_batch, spec.seq_len), device=device)
        return {"input_features": torch.randn(frames, dtype=dtype, device=device), "labels": tokens}
    return None


def batch(task: str | None, micro_batch: int, seq_len: int, device: Any, target_len: int | None = None) -> dict[str, Any]:
    """Return one micro batch of random tokens with the task's labels; those of an encoder-decoder have `target_len`."""
    import torch

    tokens = torch.randint(3, 30000, (micro_batch, seq_len), device=device)
    one = torch.zeros(micro_batch, dtype=torch.int64, device=device)
    if task == "question-answering":
        return {"input_ids": tokens, "start_positions": one, "end_positions": one.clone()}
    if target_len is not None:
        return {"input_ids": tokens, "labels": torch.randint(3, 30000, (micro_batch, target_len), device=device)}
    labels = {"sequence-classification": one, "token-classification": torch.zeros_like(tokens)}
    return {"input_ids": tokens, "labels": labels.get(str(task), tokens)}
