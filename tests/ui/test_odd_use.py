"""The page in a real browser under odd use: what is typed wrongly, the Back button, long files, no server, paper, no mouse."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.ui.test_page import FIRST, GPT2, Visit, visit

__all__ = ["visit"]
pytestmark = pytest.mark.long  # it takes a browser
#: A configuration that is too long for a link.
LONG_FILE = json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "note": "y" * 7000})


def _paste(one: Visit, text: str) -> Visit:
    one.page.focus("#paste")
    one.page.keyboard.insert_text(text)
    one.page.wait_for_selector("#files button")
    return one.settled()


def test_a_number_that_is_none_is_refused_by_name(visit: Callable[..., Visit]) -> None:
    one = visit().open(f"{FIRST}&micro_batch=x")
    assert "micro_batch: 'x' is not a whole number" in one.text("error")
    assert one.page.is_disabled("#save-answer")  # there is no answer yet
    for typed, says in [("-5", "-5 is out of range"), ("2.5", "'2.5' is not"), ("1e99", "'1e99' is not")]:
        one.page.fill("#f-micro_batch", typed)
        one.settled("No answer")
        assert says in one.text("error")
    assert one.page.get_attribute("#f-micro_batch", "aria-invalid") == "true"
    one.page.fill("#f-micro_batch", "")
    one.settled("Fits")
    assert one.page.get_attribute("#f-micro_batch", "aria-invalid") is None
    # A plan that no row has is said to be none, until one is chosen; another engine has other rows.
    one.open(f"{FIRST}&engine=ddp&show=3.cpu.cpu")
    assert one.text("verdict").startswith("No such plan\n\nDDP has no row for ZeRO-3, optimizer and parameters on cpu.")
    assert one.page.is_disabled("#hold")
    one.page.click("#rows tbody tr")
    one.settled("Fits")
    one.page.select_option("#engine", "fsdp2")
    one.settled("FSDP2")
    assert "show=" not in one.page.url


def test_history_keeps_the_files(visit: Callable[..., Visit]) -> None:
    one = visit().open()
    # The link over the form leads to the answer, and leaves the question as it is.
    one.page.focus("#skip")
    one.page.keyboard.press("Enter")
    assert one.page.evaluate("document.activeElement.id") == "answer"
    _paste(one, LONG_FILE)
    before = one.text("verdict")
    assert "ZeRO-2" in before
    one.page.click("#share")
    one.page.wait_for_function("() => document.getElementById('toast').innerText.includes('without the files')")
    one.page.check("[data-toggle=alloc_conf]")
    one.settled()
    assert one.text("verdict") != before
    one.page.go_back()
    assert one.settled().text("verdict") == before
    one.page.reload()
    assert one.settled().text("verdict") == before
    assert "pasted.json" in one.text("files")
    # Two configurations of one search, one after the other; another question makes the list old.
    one.page.click("text=Remove")
    one.settled()
    one.page.click("#search")
    one.page.wait_for_selector("#found tr:nth-child(2) button")
    for row in (1, 2):
        one.page.click(f"#found tbody tr:nth-child({row}) button")
        one.settled()
        assert not one.page.is_visible("#error")
    one.page.fill("[data-field=cpu_ram]", "64G")
    one.settled()
    assert one.text("found") == "What was found was for another question."
    one.page.fill("#global-batch", "-3")
    one.page.click("#search")
    one.page.wait_for_selector("#found .no")


def test_a_file_says_its_own_model_and_precision(visit: Callable[..., Visit]) -> None:
    one = visit().open("")  # another model, on eight GPUs
    flags = f"--model_name_or_path {GPT2} --block_size 256 --per_device_train_batch_size 2 --output_dir out --fp16"
    _paste(one, f"torchrun --nproc_per_node 2 run_clm.py {flags}\n")
    assert one.page.input_value("[data-field=model]") == GPT2
    assert one.page.input_value("#f-gpus") == "2"
    assert one.page.input_value("[data-field=dtype]") == "fp16"
    assert GPT2 in one.text("here-name")
    one.page.click("text=Remove")
    one.settled()
    assert one.page.input_value("[data-field=model]") == "meta-llama/Llama-3.1-8B"
    assert one.page.input_value("#f-gpus") == "8"
    # What is typed is one file, once it is left.
    one.page.focus("#paste")
    one.page.keyboard.type("{}")
    one.page.keyboard.press("Tab")
    one.page.wait_for_selector("#files button")
    assert one.page.locator("#files li").count() == 1
    one.page.click("text=Remove")
    # Texts are shown as they are.
    one.page.fill("[data-field=model]", "<img src=x onerror=alert(1)>模型")
    one.settled("No answer")
    assert "<img src=x onerror=alert(1)>模型" in one.text("error")
    one.page.fill("[data-field=model]", "")
    one.settled("No answer")


def test_paper_screen_readers_and_no_server(visit: Callable[..., Visit]) -> None:
    one = visit(color_scheme="dark").open()
    one.page.click("#theme")
    one.page.click("#theme")  # dark by choice
    one.page.focus("#chart")
    assert one.page.get_attribute("#chart", "role") == "slider"
    said = one.page.get_attribute("#chart", "aria-valuetext")
    one.page.keyboard.press("Home")
    assert one.page.get_attribute("#chart", "aria-valuenow") == "0"
    assert one.page.get_attribute("#chart", "aria-valuetext") != said
    one.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    one.page.emulate_media(media="print")
    assert one.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(part => part > 200)")
    assert not one.page.is_visible("#controls")
    assert one.page.is_visible("#rows")
    one.page.emulate_media(media="screen")
    one.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert one.page.evaluate("document.documentElement.dataset.theme") == "dark"
    # Zoomed to 200 % nothing is cut off at the side.
    one.page.set_viewport_size({"width": 640, "height": 450})
    one.page.wait_for_function("() => document.documentElement.scrollWidth === 640")  # once it is laid out for the new width
    # The server has gone.
    one.page.route("**/api/ask", lambda route: route.abort())
    one.page.fill("#f-micro_batch", "3")
    one.settled("No answer")
    assert "does not answer; start zeroplan ui again" in one.text("error")
    one.page.unroute("**/api/ask")
    one.page.fill("#f-micro_batch", "2")
    one.settled("Fits")
    one.faults = [fault for fault in one.faults if "ERR_FAILED" not in fault]
