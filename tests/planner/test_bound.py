"""The analytic estimate of activations: by hand, and beside traced runs."""

from __future__ import annotations

from itertools import product

import pytest

from tests.workloads import with_flat
from zeroplan.core.workload import Attention, Workload
from zeroplan.models import catalog
from zeroplan.models.load import load_model
from zeroplan.planner.formula import SPREAD, activation_estimate, usual_activations
from zeroplan.tapes import find_tape

WORK = Workload.of(micro_batch=2, seq_len=1024)
TOKENS = 2 * 1024


def test_gpt2_by_hand() -> None:
    """Twelve layers of 768 hidden units and 50,257 words: 34 bytes a token and unit, 16 a token and word."""
    assert activation_estimate(load_model("openai-community/gpt2"), WORK) == TOKENS * (12 * 34 * 768 + 16 * 50_257)


def test_a_bare_count_has_the_usual_shape() -> None:
    """A hidden size of 2,560 means 20 layers, so 12 · 20 · 2,560² parameters; logits over 2^16 words."""
    params = 12 * 20 * 2560**2
    assert usual_activations(params, WORK) == TOKENS * (20 * 34 * 2560 + 16 * (1 << 16))


def test_only_checkpointing_of_whole_blocks_lowers_the_estimate() -> None:
    params = 12 * 20 * 2560**2
    whole = with_flat(WORK, gradient_checkpointing=True)
    assert usual_activations(params, whole) == TOKENS * (20 * 2 * 2560 + 34 * 2560 + 16 * (1 << 16))
    for policy in ("every:2", "selective"):
        assert usual_activations(params, with_flat(whole, checkpoint_policy=policy)) == usual_activations(params, WORK)


@pytest.mark.long
def test_nineteen_of_twenty_traced_runs_stay_within_the_spread() -> None:
    """Of the included tapes of every fourth model. Without the factor many exceed it."""
    times = []
    for entry in list(catalog.entries())[::4]:
        spec = load_model(entry.id)
        for attn, checkpointing, rank in product(Attention, (False, True), (None, 16)):
            work = with_flat(WORK, attn=attn, gradient_checkpointing=checkpointing, lora_rank=rank)
            tape = find_tape(spec, work, plain=False)
            about = activation_estimate(spec, work)
            if tape is not None and about is not None:
                times.append(tape.expand(work.batch.micro_batch, 1024, rank).activation_peak / about)
    assert len(times) > 500
    within = sum(one <= SPREAD for one in times) / len(times)
    assert 0.95 <= within < 1
    assert sum(one <= 1 for one in times) / len(times) < 0.75
