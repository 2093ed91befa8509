"""An analytic bound on activations, for models that cannot be traced."""

from __future__ import annotations

from zeroplan.core.workload import Attention, CheckpointPolicy, Workload
from zeroplan.models.facts import spec_facts
from zeroplan.models.spec import ModelSpec

#: Bytes a token and hidden unit that a transformer layer keeps in 16 bits, dropout included, and the factor of its
#: attention scores: s·b·h·(34 + 5·a·s/h). Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
#: Transformer Models", equation 2.
_LINEAR, _SCORES = 34, 5
#: Logits in 16 bits, their fp32 copy, its log-softmax and both gradients.
_LOGIT_BYTES = 2 + 4 + 4 + 4 + 2


def activation_bound(spec: ModelSpec, workload: Workload) -> int | None:
    """Bytes that one micro batch's activations should stay below, or None where the config does not tell.

    Checkpointing whole blocks keeps each layer's input and recomputes one layer; where it keeps more, the bound is that without
    checkpointing. Flash and sdpa attention keep no scores.
    """
    facts = spec_facts(spec)
    hidden, layers, heads = facts.hidden_size, facts.layers, facts.heads
    if not hidden or not layers:
        return None
    tokens = workload.micro_batch * (workload.seq_len or 1)
    width = workload.dtype.bytes // 2
    per_layer = _LINEAR * tokens * hidden * width
    if workload.attn is Attention.EAGER and heads:
        per_layer += _SCORES * heads * tokens * (workload.seq_len or 1) * width
    whole = workload.recomputation == CheckpointPolicy()
    kept = layers * tokens * hidden * workload.dtype.bytes + per_layer if whole else layers * per_layer
    return kept + _LOGIT_BYTES * tokens * (facts.vocab_size or 0)
