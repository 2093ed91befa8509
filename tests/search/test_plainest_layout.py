"""The plainest layout within what times are off, which an answer names beside the fastest."""

from __future__ import annotations

from dataclasses import replace

from zeroplan.report.layouts import layouts_text
from zeroplan.report.terminal import PLAIN
from zeroplan.run.ask import Ask
from zeroplan.search.layout_answer import LaidOut
from zeroplan.search.layouts import _Search, _Timed, search_layouts

ASK = Ask(
    model="meta-llama/Llama-3.1-8B", gpus=8, gpu="H100", seq_len=2048, engine="fsdp2", from_scratch=True, tp=1, cp=1, pp=1
)
LAIDOUT = Ask(model="meta-llama/Llama-3.1-8B", gpus=8, gpu="H100", seq_len=2048, from_scratch=True)


def _timed(search: _Search, speed: float, **degrees: int | bool) -> _Timed:
    """Return a layout of these degrees, said to run at a speed."""
    staged = {"stage": 2, "grad_accum": 8} if "pp" in degrees else {"stage": 3}
    ask = ASK.replace(**staged, **degrees)
    resolved = search._allowed(ask)
    assert resolved is not None
    one = search._timed(ask, resolved)
    return replace(one, time=replace(one.time, tokens_per_second=speed))


def _plan(one: _Timed) -> LaidOut:
    """Plan nothing: what is plainer fits."""
    found = search_layouts(ASK)
    assert found.best is not None
    return replace(found.best, request=one.request, time=one.time)


def test_the_plainest_within_three_percent_is_named() -> None:
    search = _Search(LAIDOUT, None, None)
    plain, shared = _timed(search, 98.0), _timed(search, 100.0, tp=2, sp=True)
    named = search._plainest([shared, plain], shared, _plan)
    assert named is not None
    assert named.request.tp == 1
    assert search._plainest([shared, _timed(search, 96.0)], shared, _plan) is None  # too slow
    assert search._plainest([shared, plain], plain, _plan) is None  # the best is the plainest
    assert _timed(search, 1.0, pp=2).complexity > shared.complexity > plain.complexity


def test_the_answer_says_what_it_costs() -> None:
    found = search_layouts(ASK)
    assert found.best is not None
    slower = replace(found.best, time=replace(found.best.time, tokens_per_second=0.98 * found.best.tokens_per_second))
    said = " ".join(layouts_text(replace(found, plainest=slower), terminal=PLAIN).split())
    assert "Plainest within 3 %: 8 GPUs" in said
    assert "2.0 % slower" in said
    assert "Plainest" not in layouts_text(found, terminal=PLAIN)
    assert found.to_dict()["plainest"] is None
