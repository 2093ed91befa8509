"""Text and page of an answer say the same: both are made of its Sheet."""

from __future__ import annotations

from collections.abc import Callable
from html import unescape

import pytest

import zeroplan
from tests.golden.make import apart
from zeroplan.planner.estimate import estimate_report
from zeroplan.report.plans import plans_sheet, report_text
from zeroplan.report.plans_html import html_report
from zeroplan.report.recommendation import answer_sheet, answer_text, change_texts
from zeroplan.report.recommendation_html import answer_html
from zeroplan.report.scaling import scaling_sheet, scaling_text
from zeroplan.report.scaling_html import scaling_page
from zeroplan.report.sheet import Sheet
from zeroplan.run.ask import Ask
from zeroplan.search.api import run_search

GPT2 = "openai-community/gpt2"


def _plans() -> tuple[Sheet, str, str]:
    report = estimate_report(Ask(model=GPT2, gpu="RTX4090", depth="formula"))
    return plans_sheet(report), report_text(report), html_report(report)


def _answer() -> tuple[Sheet, str, str]:
    found = run_search(Ask(model=GPT2, gpu="RTX4090", gpus=2, depth="formula"))
    return answer_sheet(found), answer_text(found), answer_html(found)


def _scaling() -> tuple[Sheet, str, str]:
    found = zeroplan.scale(GPT2, "1..2", vram="4G", depth="formula")
    return scaling_sheet(found), scaling_text(found), scaling_page(found)


@pytest.mark.parametrize("answer", [_plans, _answer, _scaling])
def test_text_and_page_say_all_that_the_sheet_says(answer: Callable[[], tuple[Sheet, str, str]]) -> None:
    sheet, text, page = answer()
    words, shown = " ".join(text.split()), " ".join(unescape(page).split())
    assert sheet.verdict
    assert any("not in the figures: activations" in note for note in sheet.notes)
    for said in (sheet.request, *(one for _, one in sheet.sentences if one), *sheet.notes):
        assert said in words
        assert said.removeprefix(f"{sheet.name}: ") in shown
    head, _, figures = sheet.verdict.partition(": ")
    assert head in shown
    assert figures in shown


def test_what_fits_where_all_weights_only_may_is_on_both() -> None:
    with apart():  # LoRA's tapes are shipped
        found = run_search(Ask(model="meta-llama/Llama-3.1-8B", gpu="RTX4090"))
    assert found.best is not None
    assert found.best.fits is None
    texts = change_texts(found)
    assert texts[0].startswith("LoRA adapters of rank 16 (--lora-rank 16): ")
    for shown in (answer_text(found), unescape(answer_html(found))):
        assert all(text in " ".join(shown.split()) for text in texts)
