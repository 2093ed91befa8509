"""The reports in a real browser: light, dark and on a phone, every chart drawn, every text legible, nothing loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long
Cli = Callable[..., tuple[int, str, str]]
#: Contrast of text to what is behind it that the Web Content Accessibility Guidelines ask for (AA).
CONTRAST = 4.5
#: Texts whose contrast is below the argument: what they say, and the contrast.
FAINT = """least => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = color => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const color = rgba(getComputedStyle(one).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const text = [...element.childNodes].filter(node => node.nodeType === 3).map(node => node.textContent.trim()).join('');
    if (!text || ['SCRIPT', 'STYLE', 'title', 'OPTION'].includes(element.tagName) || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), own = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(rgba(own)), light(behind(element))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < least) found.push([text, contrast]);
  }
  return found;
}"""


def visit(browser: Browser, path: Path, colours: str, width: int) -> tuple[Page, list[str]]:
    """Open a page, with everything unfolded; also returns what it complains of and loads."""
    said: list[str] = []
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colours).new_page()  # type: ignore[arg-type]
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.wait_for_function("[...document.querySelectorAll('.plot')].every(one => one.querySelector('svg'))")
    return page, said


@pytest.mark.long  # it takes a browser
def test_reports_are_legible_everywhere(cli: Cli, browser: Browser, tmp_path: Path) -> None:
    estimate, recommend = tmp_path / "estimate.html", tmp_path / "recommend.html"
    words = ("openai-community/gpt2", "--gpus", "8", "--gpu", "T4", "--cpu-ram", "64G")
    assert cli("estimate", *words, "--html", str(estimate))[0] == 0
    assert cli("recommend", *words, "--html", str(recommend))[0] == 0
    for path in (estimate, recommend):
        for colours, width in (("light", 1200), ("dark", 390)):
            page, said = visit(browser, path, colours, width)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert len(page.evaluate(FAINT, 22)) > 50  # no contrast is above 21
            assert page.evaluate(FAINT, CONTRAST) == []
            page.click("#theme")
            assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") != colours
            assert page.evaluate(FAINT, CONTRAST) == []
            assert said == []
            # On paper the colours stay, and the open plan follows the verdict on its page instead of beginning a new one.
            page.emulate_media(media="print")
            how = "one => [getComputedStyle(one).breakInside, getComputedStyle(one).printColorAdjust]"
            assert {tuple(page.eval_on_selector(".card.verdict", how)), ("avoid", "exact")} == {("avoid", "exact")}
            assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
            if path is estimate:
                assert page.eval_on_selector("details.plan[open]", how) == ["auto", "exact"]
            page.context.close()
    # A verdict with a word longer than a phone is wide.
    long = tmp_path / "long.html"
    assert cli("estimate", "meta-llama/Llama-3.1-8B", "--gpu", "RTX4090", "--html", str(long))[0] == 0
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in long.read_text()
    for path in (long, estimate, recommend):
        page, _ = visit(browser, path, "light", 320)
        assert page.evaluate("document.documentElement.scrollWidth") == 320
        page.context.close()
    page, said = visit(browser, estimate, "light", 390)
    # The table of plans has the phone's width, and each bar lies below its row, as wide as the row.
    table = "() => { const one = document.querySelector('table:has(.gauge)'), box = one.parentElement;"
    assert page.evaluate(f"{table} return box.scrollWidth <= box.clientWidth }}")
    bars = f"{table} return [...one.querySelectorAll('tr:has(> td > .gauge)')].map(row => {{"
    bars += " const bar = row.querySelector('.gauge').getBoundingClientRect(), cell = row.cells[0].getBoundingClientRect();"
    bars += " return bar.width >= row.getBoundingClientRect().width - 2 && bar.bottom <= cell.bottom }) }"
    assert page.evaluate(bars) == [True] * 10
    assert page.locator(".plot svg").count() == page.locator("details.plan").count() == 10
    page.select_option("#right", label="ZeRO-3")
    assert page.inner_text("#differences th:nth-child(3)") == "ZeRO-3"
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = false)")
    page.click("a[href='#plan-7']")
    page.wait_for_function("document.getElementById('plan-7').open")
    plot = page.locator("#plan-7 .plot")
    plot.focus()
    page.keyboard.press("ArrowRight")
    assert "allocated" in plot.locator(".tip").inner_text()
    page.goto(recommend.as_uri())
    page.click("a[href='#point-0']")
    assert page.locator("a:target circle").count() == 1
    page.dispatch_event("#point-0", "click")
    page.wait_for_function("document.querySelector('tr:target')?.id === 'row-0'")
    assert said in ([], [recommend.as_uri()])


def test_the_largest_report_is_small(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "estimate.html"
    assert cli("estimate", "meta-llama/Llama-3.1-8B", "--gpus", "8", "--gpu", "H100", "--html", str(path))[0] == 0
    assert path.stat().st_size < 500_000
