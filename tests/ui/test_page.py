"""The page in a real browser: what a user does with it, and that its figures are those of the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests import patience
from tests.ui.conftest import Served
from tests.ui.test_answers import captured_loop

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Cli = Callable[..., tuple[int, str, str]]
GPT2 = "openai-community/gpt2"
FIRST = f"#model={GPT2}&gpu=T4&gpus=2"
#: Milliseconds that anything on the page may take on a slow machine.
PATIENCE = 120_000
pytestmark = pytest.mark.long  # it takes a browser


class Visit:
    """One page, with what it asked for and what went wrong on it."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.faults.append(said.text) if said.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.address = address

    def open(self, fragment: str = FIRST) -> Visit:
        self.page.goto(f"{self.address}{fragment}")
        return self.settled()

    def settled(self, verdict: str = "") -> Visit:
        """Wait until the last change has its answer, whose verdict or figures hold this text."""
        self.page.wait_for_timeout(250)  # a slider asks once it rests
        self.page.wait_for_function(
            "text => document.querySelector('main').getAttribute('aria-busy') === 'false'"
            " && document.getElementById('verdict').innerText.includes(text)",
            arg=verdict,
        )
        return self

    def text(self, name: str) -> str:
        return self.page.inner_text(f"#{name}")

    def close(self) -> None:
        """Hold what every visit must: no error, and nothing asked of anybody else."""
        own = urlsplit(self.address).netloc
        assert self.faults == []
        assert {urlsplit(url).netloc for url in self.asked if not url.startswith(("data:", "blob:"))} == {own}
        self.context.close()


@pytest.fixture
def visit(browser: Browser, served: Served) -> Iterator[Callable[..., Visit]]:
    made: list[Visit] = []

    def start(**options: Any) -> Visit:
        made.append(Visit(browser, served.address, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


def _said(cli: Cli, command: str) -> str:
    return " ".join(cli(*command.split()[1:])[1].split())


def require_said(one: Visit, cli: Cli, command: str) -> None:
    """The page's verdict is the command's; its peak, which a first screen leaves out where much is spare, is that of --why."""
    verdict, figures, peak = one.text("verdict").split("\n\n")
    assert f"{verdict}: {figures}" in _said(cli, command)
    assert f"{verdict}: {figures} {peak}" in _said(cli, f"{command} --why")


def test_figures_are_the_command_lines(visit: Callable[..., Visit], cli: Cli) -> None:
    one = visit().open()
    command = one.text("command")
    assert command == f"zeroplan estimate {GPT2} --gpus 2 --gpu T4"
    report = json.loads(cli(*command.split()[1:], "--json")[1])
    shown = one.page.eval_on_selector_all(
        "#rows tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    expected = []
    for plan in report["plans"]:
        figures = (plan["gpu"]["total"], plan["cpu"]["per_node"])
        expected.append([str(plan["stage"]), *(f"{size / 2**30:.1f}" for size in figures)])
    assert [[row[0], row[2], row[4]] for row in shown] == expected
    require_said(one, cli, command)
    # A slider, then a toggle: the figures follow, and are those of the command that the page now names.
    one.page.focus("#f-micro_batch-range")
    one.page.keyboard.press("ArrowRight")
    one.page.check("[data-field=gradient_checkpointing]")
    one.settled()
    command = one.text("command")
    assert "--micro-batch 2" in command
    assert "--gradient-checkpointing" in command
    require_said(one, cli, command)


def test_knobs_rows_and_two_plans_side_by_side(visit: Callable[..., Visit]) -> None:
    one = visit().open(f"{FIRST}&micro_batch=4&seq_len=512")
    before = one.text("verdict")
    one.page.click("#hold")
    assert one.page.is_visible(".held svg")
    knob = one.page.get_by_role("button", name="gradient checkpointing")
    total = re.search(r"→ ([\d.]+) GiB", knob.inner_text())
    assert total is not None
    knob.click()
    one.settled(f"{total[1]} of")
    assert one.page.is_checked("[data-field=gradient_checkpointing]")
    assert "total on the GPU" in one.text("difference")
    peak = one.page.inner_text("#difference tr:has-text('peak allocated') td:nth-child(2)")
    assert f"allocated {peak} GiB" in one.text("legend")
    assert one.page.locator("#difference .more-than").count() >= 3
    # A third plan stands beside the two.
    one.page.click("#hold")
    one.page.click("#rows tr:has-text('optimizer, params cpu')")
    one.settled("ZeRO-3, optimizer and parameters on cpu")
    assert one.page.locator(".held svg").count() == 2
    assert one.page.locator("#difference th").all_inner_texts() == ["GiB", "now", "held 1", "held 2"]
    one.page.click("[aria-label='Let it go: held plan 2']")
    one.page.go_back()
    one.page.go_back()
    one.page.go_back()
    one.settled(f"{total[1]} of")
    # The link holds both plans.
    other = visit()
    other.page.goto(f"{other.address}#{one.page.url.partition('#')[2]}")
    other.settled(f"{total[1]} of")
    other.page.wait_for_selector(".held svg")
    assert other.text("difference") == one.text("difference")
    # Back undoes the knob.
    one.page.go_back()
    one.settled()
    assert one.text("verdict") == before
    # A row: by mouse, then the stage by keyboard.
    one.page.click("#rows tr:has-text('optimizer, params cpu')")
    one.settled("ZeRO-3, optimizer and parameters on cpu")
    assert "--stage 3 --offload-optimizer cpu --offload-param cpu" in one.text("command")
    one.page.focus("input[name=stage][value='3']")
    one.page.keyboard.press("ArrowLeft")
    one.settled("ZeRO-2, optimizer on cpu")
    assert one.page.is_checked("input[name=offload_optimizer][value=cpu]")


def test_files_in_and_out(visit: Callable[..., Visit], tmp_path: Path, cli: Cli) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}))
    one = visit(accept_downloads=True).open()
    one.page.set_input_files("#pick", str(config))
    one.settled("ZeRO-2")
    assert one.page.input_value("#f-micro_batch") == "2"
    assert one.text("command").endswith("--from ds_config.json")
    printed = _said(cli, one.text("command").replace("ds_config.json", str(config)))
    assert one.text("verdict").split("\n\n")[1] in printed
    one.page.click("text=Remove")
    one.settled("ZeRO-")
    flags = f"--model_name_or_path {GPT2} --block_size 256 --per_device_train_batch_size 2 --output_dir out"
    script = f"export OMP_NUM_THREADS=1\n\ntorchrun --nproc_per_node 2 run_clm.py {flags}\n"
    one.page.focus("#paste")
    one.page.keyboard.insert_text(script)
    one.settled()
    assert "pasted.sh" in one.text("files")
    assert one.page.input_value("#f-seq_len") == "256"
    one.page.click("text=Remove")
    recipe = f"model_name_or_path: {GPT2}\ndataset_text_field: text\nmax_length: 512\nper_device_train_batch_size: 4\n"
    one.page.focus("#paste")
    one.page.keyboard.insert_text(recipe)
    one.settled()
    assert "TRL" in one.text("notes")
    assert [one.page.input_value(f"#f-{field}") for field in ("micro_batch", "seq_len")] == ["4", "512"]
    one.page.click("text=Remove")
    one.page.set_input_files("#pick", str(captured_loop(tmp_path)))
    one.settled("the script as it runs")
    assert one.page.input_value("[data-field='gpu']") == "A10G"
    assert one.text("verdict").split("\n\n")[1] in _said(cli, f"zeroplan estimate --from {tmp_path / 'run.json'}")
    assert one.page.query_selector("#chart svg") is not None
    one.page.click("text=Remove")
    one.settled("ZeRO-")
    one.page.focus("#paste")
    one.page.keyboard.insert_text("{ not json")
    one.page.wait_for_selector("#error:visible")
    assert "pasted.json: is not JSON" in one.text("error")
    one.page.click("text=Remove")
    one.settled("ZeRO-")
    assert not one.page.is_visible("#error")
    one.page.fill("#global-batch", "8")
    one.page.click("#search")
    one.page.wait_for_selector("#found tr button")
    high = one.page.inner_text("#found tbody tr td:nth-child(3)")
    one.page.click("#found tr button")
    one.settled(f"(at most {high})")
    one.page.click("#make-files")
    with one.page.expect_download() as got:
        one.page.click("text=Download ds_config.json")
    saved = tmp_path / "saved.json"
    got.value.save_as(saved)
    assert json.loads(saved.read_text())["zero_optimization"]["stage"] in (0, 1, 2, 3)
    assert one.page.is_visible("text=Download train.py")
    with one.page.expect_download() as got:
        one.page.click("text=as zeroplan.zip")
    with zipfile.ZipFile(got.value.path()) as packed:
        assert packed.read("ds_config.json") == saved.read_bytes()
        assert "train.py" in packed.namelist()
    one.page.click("#share")
    assert one.page.evaluate("navigator.clipboard.readText()") == one.page.url


def test_phone_dark_and_keyboard(visit: Callable[..., Visit]) -> None:
    one = visit(viewport={"width": 390, "height": 844}, color_scheme="dark", is_mobile=True, has_touch=True).open()
    width = "document.documentElement.scrollWidth"
    assert one.page.evaluate(width) == 390
    colors = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    ground, ink = one.page.evaluate(colors)
    assert max(map(int, re.findall(r"\d+", ground))) < 60 < 200 < min(map(int, re.findall(r"\d+", ink)))
    one.page.click("#theme")
    ground, _ = one.page.evaluate(colors)
    assert min(map(int, re.findall(r"\d+", ground))) > 200
    assert one.page.evaluate("document.getElementById('verdict').getBoundingClientRect().top") < 200
    one.page.click("#hold")
    one.page.click("summary:has-text('Every line')")
    assert one.page.evaluate(width) == 390
    # A verdict with a long word, and rows of which two limits say no, stay within the narrowest phone.
    small = visit(viewport={"width": 320, "height": 700}, is_mobile=True).open("#model=meta-llama/Llama-3.1-8B&gpu=RTX4090")
    small.settled("PYTORCH_ALLOC_CONF=expandable_segments:True")
    assert small.page.evaluate(width) == 320
    cells = "() => [...document.querySelectorAll('#rows td:last-child')].map(one => one.getBoundingClientRect().right)"
    assert max(small.page.evaluate(cells)) <= 320
    # All of it by keyboard: what has the focus shows it, and the chart's cursor moves.
    one.page.focus("#chart")
    assert one.text("legend").startswith("At the peak:")
    one.page.keyboard.press("Home")
    one.page.wait_for_function("() => document.getElementById('legend').innerText.startsWith('Here:')")
    one.page.focus("#theme")
    one.page.keyboard.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle + document.activeElement.dataset.field"
    assert one.page.evaluate(outline) == "solidmodel"
    unnamed = """[...document.querySelectorAll('button, input, select, textarea')]
        .filter(e => !e.labels?.length && !e.ariaLabel && !e.innerText?.trim()).map(e => e.outerHTML)"""
    assert one.page.evaluate(unnamed) == []


def test_an_unknown_model_is_refused_in_one_line(visit: Callable[..., Visit]) -> None:
    one = visit().open("#model=meta-lama/Llama-3.2-1B&gpu=H100")
    assert "did you mean 'meta-llama/Llama-3.2-1B'" in one.text("error")
    assert one.text("verdict") == "No answer"
    one.page.fill("[data-field=model]", "7.5B")
    one.settled("Unknown")
    assert "Not in the figures" in one.text("verdict") + one.text("notes")
    one.page.fill("#f-micro_batch", "-5")
    one.settled("No answer")
    assert "“Micro batch”: -5 is out of range" in one.text("error")


@pytest.fixture(scope="module")
def made_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, set[str]]]:
    """The address of the page that needs no server, made anew and served as a static host does; and parts of the names of files
    that its host does not give for now.
    """
    gone: set[str] = set()
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("made") / "page"
    maker = Path(__file__).parents[2] / "docs" / "make_page.py"
    done = subprocess.run(
        [sys.executable, str(maker), str(folder)], capture_output=True, text=True, timeout=patience.PATIENCE, check=False
    )
    if done.returncode and not (folder / "pyodide" / "pyodide.mjs").exists():
        pytest.skip("npm gives no Pyodide here")
    assert done.returncode == 0, done.stderr
    assert ("no compiler for WebAssembly" in done.stderr) == (find_spec("ziglang") is None)

    class Quiet(SimpleHTTPRequestHandler):
        extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            if any(one in self.path for one in gone):
                self.send_error(503)
            else:
                super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", gone
    server.shutdown()
    server.server_close()


@pytest.mark.timeout(600)
def test_python_in_the_browser_gives_the_same(browser: Browser, made_page: tuple[str, set[str]], cli: Cli) -> None:
    one = Visit(browser, made_page[0])
    one.page.goto(f"{made_page[0]}{FIRST}")
    one.page.wait_for_selector("#rows td.pending")  # the formulas' rows
    assert one.page.inner_text("#rows tr:has(td.pending) td:nth-child(3)").startswith("≥ ")
    one.settled("Fits")
    answer = one.text("verdict").split("\n\n")
    assert f"{answer[0]}: {answer[1]} {answer[2]}" in _said(cli, one.text("command"))
    with one.page.expect_download() as got:
        one.page.click("#save-answer")
    printed = json.loads(cli(*one.text("command").split()[1:], "--json")[1])
    del printed["zeroplan"]  # the version and this command
    assert json.loads(Path(got.value.path()).read_text()) == printed
    # It came from the same C++ as in the terminal, where make_page found a compiler.
    assert ("run in Python here" in one.text("footer")) == (find_spec("ziglang") is None)
    # One model's tapes are fetched, and no other's.
    fetched = {url.rsplit("/", 1)[1] for url in one.asked if "/tapes/" in url}
    assert fetched <= {"same.json", "openai-community--gpt2.json.xz"}
    # Another program's file, and a name that nobody knows.
    one.page.focus("#paste")
    one.page.keyboard.insert_text(f"model_name_or_path: {GPT2}\ndataset_text_field: text\nmax_length: 512\n")
    one.settled()
    assert "TRL" in one.text("notes")
    one.page.click("text=Remove")
    one.page.fill("[data-field=model]", "meta-lama/Llama-3.2-1B")
    one.page.wait_for_selector("#error:visible")
    assert "did you mean 'meta-llama/Llama-3.2-1B'" in one.text("error")
    one.close()


@pytest.mark.timeout(600)
def test_what_cannot_be_fetched_is_tried_again(browser: Browser, made_page: tuple[str, set[str]]) -> None:
    """Neither the start nor a model's tape is lost for good, and what is loaded works meanwhile."""
    address, gone = made_page
    one = Visit(browser, address)
    gone.add("packages.zip")
    one.page.goto(f"{address}{FIRST}")
    one.page.wait_for_selector("text=Try again")
    assert "packages.zip cannot be fetched: the server answered 503" in one.text("verdict")
    gone.clear()
    one.page.click("text=Try again")
    one.page.wait_for_selector("#rows tr")
    one.settled("Fits")
    gone.add("Llama-3.2-1B")
    one.page.fill("[data-field=model]", "meta-llama/Llama-3.2-1B")
    one.page.wait_for_selector("#error button")
    assert "meta-llama--Llama-3.2-1B.json.xz cannot be fetched" in one.text("error")
    one.page.fill("[data-field=model]", GPT2)
    one.settled("Fits")
    assert not one.page.is_visible("#error")
    one.page.fill("[data-field=model]", "meta-llama/Llama-3.2-1B")
    one.page.wait_for_selector("#error button")
    gone.clear()
    one.page.click("#error button")
    one.settled("ZeRO-1")
    assert all("503" in fault for fault in one.faults)
    one.faults.clear()
    one.close()
