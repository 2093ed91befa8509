"""Knobs that lower a plan's memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.make import apart
from zeroplan.planner.estimate import estimate_runs
from zeroplan.planner.relief import _fused_head
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.ui.answers import answer

Cli = Callable[..., tuple[int, str, str]]
QWEN = "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(("engine", "micro", "offered"), [("ddp", 8, True), ("zeroplan", 8, False), ("ddp", 1, False)])
def test_a_head_in_tiles_is_a_knob_where_logits_and_loss_are_a_large_part(engine: str, micro: int, offered: bool) -> None:
    model, length = (QWEN, 512) if micro > 1 else ("EleutherAI/pythia-160m", 64)
    ask = Ask(model=model, vram="24G", engine=engine, stage=0, micro_batch=micro, seq_len=length)
    resolved, run = resolve(ask), estimate_runs(ask).runs[0]
    assert run is not None
    changes = list(_fused_head(resolved.engine, resolved.cases[0], run, None))
    assert [one.flags for one in changes] == (["--chunked-head"] if offered else [])


def test_the_head_in_tiles_needs_no_tape_of_the_users_and_is_what_its_flag_plans(cli: Cli, tmp_path: Path) -> None:
    words = ("estimate", QWEN, "--gpu", "2xRTX4090", "--micro-batch", "4", "--stage", "1", "--offload-optimizer", "none")
    with apart():  # an empty cache, and no torch
        (tiles,) = [one for one in json.loads(cli(*words, "--json")[1])["reliefs"] if one["flags"] == "--chunked-head"]
        (plan,) = json.loads(cli(*words, "--chunked-head", "--json")[1])["plans"]
        assert plan["gpu"]["total"] == tiles["total"]
        (trl,) = json.loads(cli(*words, "--chunked-head", "--json")[1])["plans"]
        assert trl["fits"] is tiles["fits"]
        code, out, err = cli(*words, "--chunked-head", "--liger")
        assert (code, out, "--chunked-head: Liger" in err) == (2, "", True)


def test_a_search_names_the_head_in_tiles_where_it_is_faster(cli: Cli) -> None:
    words = ("recommend", QWEN, "--gpu", "2xRTX4090")
    with apart():
        best = json.loads(cli(*words, "--json")[1])["ranking"][0]
        (said,) = [text for text in best["reasons"] if text.startswith("head and loss in tiles")]
        tiled = json.loads(cli(*words, "--chunked-head", "--json")[1])["ranking"][0]
        gain = float(said.partition(" make it ")[2].partition(" ")[0])
        assert gain > 1.02
        assert tiled["tokens_per_second"] / best["tokens_per_second"] >= gain - 0.005


def test_the_page_turns_the_knob(cli: Cli) -> None:
    """What a knob changes is a field of the page's question."""
    with apart():
        asked = {"model": QWEN, "gpu": "RTX4090", "micro_batch": 4, "engine": "ddp"}
        (knob,) = [one for one in answer(asked)["knobs"] if one["flags"] == "--chunked-head"]
        assert answer(asked | knob["change"])["report"]["plans"][0]["gpu"]["total"] == knob["total"]
