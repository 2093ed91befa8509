"""The analytic bound on activations, by hand."""

from __future__ import annotations

from dataclasses import replace

from zeroplan.core.workload import Workload
from zeroplan.models.load import load_model
from zeroplan.planner.bound import activation_bound, usual_activations

WORK = Workload(micro_batch=2, seq_len=1024)
TOKENS = 2 * 1024


def test_gpt2_by_hand() -> None:
    """Twelve layers of 768 hidden units and 50,257 words: 34 bytes a token and unit, 16 a token and word."""
    assert activation_bound(load_model("openai-community/gpt2"), WORK) == TOKENS * (12 * 34 * 768 + 16 * 50_257)


def test_a_bare_count_has_the_usual_shape() -> None:
    """A hidden size of 2,560 means 20 layers, so 12 · 20 · 2,560² parameters; logits over 2^16 words."""
    params = 12 * 20 * 2560**2
    assert usual_activations(params, WORK) == TOKENS * (20 * 34 * 2560 + 16 * (1 << 16))


def test_only_checkpointing_of_whole_blocks_lowers_the_bound() -> None:
    params = 12 * 20 * 2560**2
    whole = replace(WORK, gradient_checkpointing=True)
    assert usual_activations(params, whole) == TOKENS * (20 * 2 * 2560 + 34 * 2560 + 16 * (1 << 16))
    for policy in ("every:2", "selective"):
        assert usual_activations(params, replace(whole, checkpoint_policy=policy)) == usual_activations(params, WORK)
