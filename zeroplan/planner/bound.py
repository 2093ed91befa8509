"""An analytic bound on activations, for models that cannot be traced."""

from __future__ import annotations

from zeroplan.core.workload import Attention, CheckpointPolicy, Workload
from zeroplan.models.facts import spec_facts
from zeroplan.models.spec import ModelSpec

#: Bytes a token and hidden unit that a transformer layer keeps in 16 bits, dropout included, and the factor of its
#: attention scores: s·b·h·(34 + 5·a·s/h). Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
#: Transformer Models", equation 2.
_LINEAR, _SCORES = 34, 5
#: Bytes a token and word: logits in 16 bits, their fp32 copy, its log-softmax and both gradients.
_LOGIT_BYTES = 2 + 4 + 4 + 4 + 2
#: Hidden units a layer, and the vocabulary, of a model of which only the number of parameters is known.
#: Source: Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1.
_HIDDEN_PER_LAYER, _USUAL_VOCABULARY = 128, 1 << 16


def activation_bound(spec: ModelSpec, workload: Workload) -> int | None:
    """Bytes that one micro batch's activations should stay below, or None where the config does not tell."""
    facts = spec_facts(spec)
    if not facts.hidden_size or not facts.layers:
        return None
    return _bound(facts.hidden_size, facts.layers, facts.heads or 0, facts.vocab_size or 0, workload)


def usual_activations(params: int, workload: Workload) -> int:
    """The bound in bytes for a bare count, whose shape is taken to be the usual one.

    With layers = hidden / 128, as in the GPT-3 family and after it, 12 · layers · hidden² parameters give the hidden size.
    """
    hidden = max(1, round(float(params * _HIDDEN_PER_LAYER / 12) ** (1 / 3)))
    return _bound(hidden, max(1, hidden // _HIDDEN_PER_LAYER), 0, _USUAL_VOCABULARY, workload)


def _bound(hidden: int, layers: int, heads: int, vocabulary: int, workload: Workload) -> int:
    """Bytes of one micro batch's activations.

    Checkpointing whole blocks keeps each layer's input and recomputes one layer; where it keeps more, the bound is that without
    checkpointing. Flash and sdpa attention keep no scores.
    """
    tokens = workload.micro_batch * (workload.seq_len or 1)
    width = workload.dtype.bytes // 2
    per_layer = _LINEAR * tokens * hidden * width
    if workload.attn is Attention.EAGER:
        per_layer += _SCORES * heads * tokens * (workload.seq_len or 1) * width
    whole = workload.recomputation == CheckpointPolicy()
    kept = layers * tokens * hidden * workload.dtype.bytes + per_layer if whole else layers * per_layer
    return kept + _LOGIT_BYTES * tokens * vocabulary
