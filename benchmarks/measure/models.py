"""Models with random weights, built from the catalog's configs: memory does not depend on weights.

A spec's ``model_overrides`` changes single values, so that a model of real widths and few layers can be recorded event by
event.
"""

from __future__ import annotations

from typing import Any

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
#: What training needs and the catalog, which is about shapes, leaves out; by model type.
_TOKENS: dict[str, dict[str, Any]] = {"t5": {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}}

AUTO_CLASS: dict[str, str] = {
    "roberta": "AutoModelForMaskedLM",
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "modernbert": "AutoModelForMaskedLM",
    "deberta-v2": "AutoModelForMaskedLM",
}
"""``model_type`` to the transformers auto class that gives a loss; all others are causal."""


def build_config(name: str, overrides: dict[str, Any]) -> Any:
    """Return the transformers config of ``name`` with single values replaced."""
    from transformers import AutoConfig

    from zeroplan.models.catalog import find

    entry = find(name)
    known = TINY if name == "tiny/llama" else dict(entry.config) if entry else {}
    if not known:
        raise ValueError(f"no config values are known for {name}")
    values = known | _TOKENS.get(known["model_type"], {}) | overrides
    return AutoConfig.for_model(values["model_type"], **{k: v for k, v in values.items() if k != "model_type"})


#: A task's auto class, by the names of ``--task``.
TASKS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}


def auto_class(model_type: str, task: str | None = None) -> Any:
    """Return the transformers auto class whose ``from_config`` builds this type with a loss."""
    import transformers

    return getattr(transformers, TASKS[task] if task else AUTO_CLASS.get(model_type, "AutoModelForCausalLM"))


def batch(task: str | None, micro_batch: int, seq_len: int, device: Any) -> dict[str, Any]:
    """Return one micro batch of random tokens with the task's labels."""
    import torch

    tokens = torch.randint(3, 30000, (micro_batch, seq_len), device=device)
    one = torch.zeros(micro_batch, dtype=torch.int64, device=device)
    if task == "question-answering":
        return {"input_ids": tokens, "start_positions": one, "end_positions": one.clone()}
    labels = {"sequence-classification": one, "token-classification": torch.zeros_like(tokens)}
    return {"input_ids": tokens, "labels": labels.get(str(task), tokens)}
