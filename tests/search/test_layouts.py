"""The search over layouts: its order, the first that fits, and the smallest cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.planner.request import Request
from zeroplan.report.layouts import layouts_text
from zeroplan.report.terminal import Terminal
from zeroplan.search.layouts import LayoutAnswer, _orders, search_layouts, smallest_cluster

Cli = Callable[..., tuple[int, str, str]]
LLAMA = Request(model="meta-llama/Llama-3.1-8B", gpus=8, gpu="H100", seq_len=8192)


def test_layouts_that_share_less_come_first() -> None:
    found = list(_orders(replace(LLAMA, nodes=8, seq_len=32768)))
    ranks = [one["tp"] * one["pp"] * one["cp"] for one in found]
    assert ranks == sorted(ranks)
    assert all(64 % count == 0 for count in ranks)
    assert max(one["tp"] for one in found) == 8  # a group of matrices stays within a node
    assert max(one["cp"] for one in found) == 8  # 4,096 tokens a rank
    assert len({json.dumps(one, sort_keys=True) for one in found}) == len(found)
    of_two = [one for one in found if one["tp"] * one["pp"] * one["cp"] == 2]
    assert [(one["tp"], one["pp"], one["cp"]) for one in of_two] == [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
    for one in found:
        assert one["sp"] == (one["tp"] > 1 and one["pp"] == 1)
        assert one["stage"] == (3 if one["pp"] == 1 else 2)
        assert one.get("grad_accum", 1) >= (one["pp"] if one["pp"] > 1 else 1)
    assert all(one["cp"] == 1 for one in _orders(replace(LLAMA, nodes=8, seq_len=4096)))


def test_the_fastest_that_fits_is_the_answer() -> None:
    """8,192 tokens of Llama 3.1 8B on one node: FSDP2 alone misses, and what comes behind it is slower."""
    found = smallest_cluster(LLAMA, checkpointing=False)
    assert found.best is not None
    assert found.best.request.nodes == 1
    assert found.best.plan.fits is True
    assert any(one.layout.dp == 8 for one in found.tried)
    speeds = [one.time.tokens_per_second for one in (*found.tried, found.best)]
    assert speeds == sorted(speeds, reverse=True)
    for one in found.tried:
        assert one.plan.fits is False
    text = layouts_text(found, terminal=Terminal(width=None))
    assert f"Modelled: {found.best.time.tokens_per_second:,.0f} tokens/s" in text
    assert "8 GPUs as dp 8, ZeRO-3: " in text
    assert "were not measured" in text
    assert text.splitlines()[0] == layouts_text(found, terminal=Terminal(width=None), quiet=True)


def test_states_that_exceed_every_card_need_no_simulation(cli: Cli) -> None:
    code, said, _ = cli("recommend", "meta-llama/Llama-3.1-405B", "--gpu", "H100", "--gpus", "8", "--layouts")
    assert code == 1
    assert "Nothing fits" in said
    assert "of model states alone" in said
    code, said, _ = cli("recommend", "meta-llama/Llama-3.1-405B", "--gpu", "H100", "--gpus", "8", "--layouts", "--json")
    answer = json.loads(said)
    assert answer["best"] is None
    assert all(one["model_states"] > one["usable"] and one["total"] is None for one in answer["tried"])
    assert any(one["layout"]["dp"] == 8 for one in answer["tried"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"engine": "ddp"}, "layouts are planned for fsdp2 alone"),
        ({"gpu": None}, "no limit to fit"),
        ({"model": "nobody/knows-this-model"}, "nobody/knows-this-model"),
    ],
)
def test_what_cannot_be_asked_is_one_line(changed: dict[str, str | None], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        search_layouts(replace(LLAMA, **changed))  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_options_of_the_other_search_are_refused(cli: Cli) -> None:
    code, _, fault = cli("recommend", "meta-llama/Llama-3.1-8B", "--gpu", "8xH100", "--layouts", "--global-batch", "64")
    assert code == 2
    assert "--global-batch" in fault


def test_nothing_tried_is_said_so() -> None:
    assert "Nothing fits" in layouts_text(LayoutAnswer(None, ()), terminal=Terminal(width=None))
