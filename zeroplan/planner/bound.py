"""Activations by an analytic formula, for runs that are not simulated."""

from __future__ import annotations

from zeroplan.core.workload import Attention, CheckpointPolicy, Workload
from zeroplan.models.facts import spec_facts
from zeroplan.models.spec import ModelSpec

#: A transformer layer keeps s·b·h·(34 + 5·a·s/h) bytes in 16 bits, for sequence s, micro batch b, hidden size h and a heads.
#: Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
#: Transformer Models", equation 2.
_LINEAR, _SCORES = 34, 5
#: Bytes for each token and word of the vocabulary: logits in 16 bits, their fp32 copy, its log-softmax and both gradients.
_LOGIT_BYTES = 2 + 4 + 4 + 4 + 2
#: Hidden size over number of layers, and the vocabulary, for a model of which only the number of parameters is known.
#: Source: Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1.
_HIDDEN_PER_LAYER, _USUAL_VOCABULARY = 128, 1 << 16
#: 19 of 20 traced runs keep at most this many times the formula's bytes: those of included tapes, at a micro batch of 2 and a
#: sequence of 1,024. The others are DeBERTa's and T5's scores, and LoRA on experts. Source: tests/planner/test_bound.py.
SPREAD = 2.4


def activation_estimate(spec: ModelSpec, workload: Workload) -> int | None:
    """About the bytes of one micro batch's activations; None where the config does not give the model's widths."""
    facts = spec_facts(spec)
    if not facts.hidden_size or not facts.layers:
        return None
    return _estimate(facts.hidden_size, facts.layers, facts.heads or 0, facts.vocab_size or 0, workload)


def usual_activations(params: int, workload: Workload) -> int:
    """About the bytes of activations of a model of which only the number of parameters is known.

    The hidden size follows from 12 · layers · hidden² parameters and layers = hidden / 128, as in the GPT-3 family.
    """
    hidden = max(1, round(float(params * _HIDDEN_PER_LAYER / 12) ** (1 / 3)))
    return _estimate(hidden, max(1, hidden // _HIDDEN_PER_LAYER), 0, _USUAL_VOCABULARY, workload)


def _estimate(hidden: int, layers: int, heads: int, vocabulary: int, workload: Workload) -> int:
    """Estimate the bytes of one micro batch's activations.

    Checkpointing of whole blocks keeps each layer's input and recomputes one layer at a time. Other policies keep more, so
    they get the figure without checkpointing. Flash and sdpa attention keep no scores.
    """
    tokens = workload.batch.rows * (workload.batch.seq_len or 1)
    width = workload.numerics.dtype.bytes // 2
    per_layer = _LINEAR * tokens * hidden * width
    if workload.numerics.attn is Attention.EAGER:
        per_layer += _SCORES * heads * tokens * (workload.batch.seq_len or 1) * width
    whole = workload.recomputation == CheckpointPolicy()
    kept = layers * tokens * hidden * workload.numerics.dtype.bytes + per_layer if whole else layers * per_layer
    return kept + _LOGIT_BYTES * tokens * vocabulary
