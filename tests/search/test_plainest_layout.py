"""The plainest layout within what times are off, which an answer names beside the fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan.report.layouts import layouts_text, reason
from zeroplan.report.terminal import PLAIN
from zeroplan.run.ask import Ask
from zeroplan.search.layout_answer import LaidOut
from zeroplan.search.layouts import _Search, _Timed, search_layouts

ASK = Ask(
    model="meta-llama/Llama-3.1-8B", gpus=8, gpu="H100", seq_len=2048, engine="fsdp2", from_scratch=True, tp=1, cp=1, pp=1
)
LAIDOUT = Ask(model="meta-llama/Llama-3.1-8B", gpus=8, gpu="H100", seq_len=2048, from_scratch=True)


def _timed(search: _Search, speed: float, **degrees: int | bool) -> _Timed:
    """Return a layout of these degrees, said to be compared at a speed."""
    staged = {"stage": 2, "grad_accum": 8} if "pp" in degrees else {"stage": 3}
    ask = ASK.replace(**staged, **degrees)
    resolved = search._allowed(ask)
    assert resolved is not None
    one = search._timed(ask, resolved)
    assert one is not None
    return replace(one, compared=replace(one.compared, tokens_per_second=speed))


def _plan(one: _Timed) -> LaidOut:
    """Plan nothing: what is plainer fits."""
    found = search_layouts(ASK)
    assert found.best is not None
    return replace(found.best, request=one.request, time=one.time, compared=one.worth)


def test_the_plainest_within_three_percent_is_named() -> None:
    search = _Search(LAIDOUT, None, None)
    plain, shared = _timed(search, 98.0), _timed(search, 100.0, tp=2, sp=True)
    named = search._plainest([shared, plain], shared, _plan)
    assert named is not None
    assert named.request.tp == 1
    assert search._plainest([shared, _timed(search, 96.0)], shared, _plan) is None  # too slow
    assert search._plainest([shared, plain], plain, _plan) is None  # the best is the plainest
    assert _timed(search, 1.0, pp=2).complexity > shared.complexity > plain.complexity


def test_stages_are_compared_by_steps_of_as_many_sequences() -> None:
    """A pipeline's own step takes four micro batches a stage; order, text and JSON count one, as ranks without stages take."""
    search = _Search(LAIDOUT, None, None)
    found = search.on(1)
    assert found.best is not None
    assert found.best.compared == found.best.tokens_per_second
    ask = ASK.replace(pp=2, stage=2, grad_accum=8)
    staged, alone = (search._allowed(ask.replace(grad_accum=count)) for count in (8, 2))
    assert staged is not None
    assert alone is not None
    one, same = (search._timed(ask.replace(grad_accum=count), each) for count, each in ((8, staged), (2, alone)))
    assert one is not None
    assert same is not None
    assert one.worth == pytest.approx(same.time.tokens_per_second)
    assert one.worth < 0.9 * one.time.tokens_per_second
    laid_out = search._planned(one, [])
    assert laid_out.to_dict()["modelled"]["compared_tokens_per_second"] == one.worth
    faster = replace(laid_out, compared=1.1 * found.best.compared)
    too_large = replace(faster, plan=faster.plan.model_copy(update={"gpu": faster.plan.gpu.model_copy(update={"usable": 1})}))
    assert "would be 10 % faster" in reason(replace(found, tried=(too_large,)))


def test_the_answer_says_what_it_costs() -> None:
    found = search_layouts(ASK)
    assert found.best is not None
    slower = replace(found.best, compared=0.98 * found.best.compared)
    said = " ".join(layouts_text(replace(found, plainest=slower), terminal=PLAIN).split())
    assert "Plainest within 3 %: 8 GPUs" in said
    assert "2.0 % slower" in said
    assert "Plainest" not in layouts_text(found, terminal=PLAIN)
    assert found.to_dict()["plainest"] is None
