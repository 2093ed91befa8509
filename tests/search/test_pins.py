"""A search that leaves more open is never beaten by one that pins a choice, and its list is in the order of its goal."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

import zeroplan
from zeroplan.api import Recommendations

MODELS = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B")
CARDS = ("H100", "A100-40G", "RTX4090", "L40S")


def _speed(found: Recommendations) -> float:
    return found[0].tokens_per_second if found and found[0].fits else 0.0


def _compare(seed: int, searches: int) -> None:
    draw = random.Random(seed)
    for _ in range(searches):
        asked = {"model": draw.choice(MODELS), "gpu": draw.choice(CARDS), "gpus": draw.choice((1, 2, 8))}
        asked |= {"seq_len": draw.choice((512, 2048)), "engine": draw.choice(("deepspeed", "fsdp2", "zeroplan"))}
        free = zeroplan.recommend(**asked, explain=False)
        speeds = [one.tokens_per_second for one in free if one.fits]
        assert all(later <= 1.001 * earlier for earlier, later in pairwise(speeds)), asked
        verdicts = [one.plan.verdict.rank for one in free]
        assert verdicts == sorted(verdicts), asked
        for _ in range(3):
            pins = {
                "stage": draw.choice((None, 1, 2, 3)),
                "micro_batch": draw.choice((None, 1, 4, 16)),
                "gradient_checkpointing": draw.choice((None, False, True)),
            }
            try:
                pinned = zeroplan.recommend(**asked, **pins, explain=False)
            except zeroplan.BadInput:  # the engine has no such stage
                continue
            assert _speed(pinned) <= 1.001 * _speed(free), (asked, pins)


def test_a_narrower_search_never_beats_a_wider_one() -> None:
    _compare(20261124, 2)


@pytest.mark.long
def test_none_of_300_pins_beats_the_search_without_them() -> None:
    _compare(20261125, 100)
