"""What a search over layouts leaves out for its floor, its order or its variants' bound is no better than its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.run.ask import Ask
from zeroplan.search.layout_orders import LEAST_GAIN, divides
from zeroplan.search.layouts import _Search, _Timed

pytestmark = [pytest.mark.long, pytest.mark.torch]
CASES: dict[str, dict[str, Any]] = {
    "a model that is split to fit": {"model": "meta-llama/Llama-3.1-8B", "gpus": 8, "gpu": "A100-40G", "seq_len": 8192},
    "two nodes": {"model": "meta-llama/Llama-3.1-8B", "gpus": 4, "nodes": 2, "gpu": "L40S", "seq_len": 8192},
    "a mixture": {"model": "Qwen/Qwen3-30B-A3B", "gpus": 8, "nodes": 2, "gpu": "H100", "seq_len": 4096},
    "what hardly fits": {"model": "Qwen/Qwen2.5-14B", "gpus": 8, "gpu": "A100-40G", "seq_len": 16384},
}


def every_layout(search: _Search, asked: Ask) -> list[_Timed]:
    """All layouts that the search may name, with their variants, whatever they need."""
    found = []
    for possible in search._possible(asked):
        plain = search._allowed(possible)
        if plain is None:
            continue
        one = search._timed(possible, plain)
        found.append(one)
        for fields in search._orders.variants(asked, possible):
            request = possible.replace(**fields)
            resolved = search._allowed(request) if divides(request) else None
            if resolved is not None:
                found.append(replace(search._timed(request, resolved), plain=one))
    return found


def worth(one: _Timed) -> float:
    """Tokens a second by which layouts are ordered: a variant's count for less."""
    return one.worth / (1 + LEAST_GAIN) if one.plain is not None else one.worth


@pytest.mark.parametrize("case", CASES)
def test_no_layout_that_fits_is_better_than_the_answer(case: str) -> None:
    request = Ask(**CASES[case])
    search = _Search(request, None, None)
    best = search.on(request.nodes).best
    assert best is not None
    mine = max(worth(one) for one in every_layout(search, search._request) if one.time == best.time)
    tried = 0
    for one in every_layout(search, search._request):
        other = worth(one)
        if other <= mine:
            continue
        tried += 1
        try:
            fits = search._planned(one, []).plan.fits
        except BadInput:
            continue
        assert fits is not True, (one.request.values, other, mine)
    assert tried, "nothing faster was left out: the case holds nothing"
