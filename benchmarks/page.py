"""How long the page with Python in the browser takes: to load, to its first rows, and to all ten rows of an 8B model.

``make page && python -m benchmarks.page [FOLDER] [--runs 5] [--chromium PATH] [--json FILE]``. Chromium runs the made page's
own worker over a local static server. Correctness first: the report is the one that ``zeroplan estimate --json`` prints. Wall
seconds depend on what else the machine does, so the processor seconds of all of the browser's processes stand beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, sync_playwright

MODEL = "meta-llama/Llama-3.1-8B"
QUESTION = {"verb": "estimate", "model": MODEL, "gpus": 8, "gpu": "H100"}
START = """async () => {
    const { InThePage } = await import('./backend.js');
    window.planner = new InThePage();
    return planner.names();
}"""
#: Asks, and notes after how many seconds the formulas' rows, the first simulated row, the last, and the answer stand.
ASK = """async (question) => {
    const begin = performance.now();
    const now = () => (performance.now() - begin) / 1000;
    const times = { formulas: 0, row: 0, rows: 0, answer: 0 };
    const answer = await planner.ask(question, ({ plan }) => {
        if (plan?.depth === 'formula') times.formulas = now();
        else if (plan) {
            times.row ||= now();
            times.rows = now();
        }
    });
    times.answer = now();
    return { times, report: answer.report };
}"""


class _Quiet(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def processor_seconds() -> float:
    """Return the processor time of the browser so far, in seconds: all processes that this one started."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measured(page: Page, expected: dict[str, Any]) -> dict[str, float]:
    """Ask once; returns seconds by name, `processor` among them."""
    before = processor_seconds()
    found = page.evaluate(ASK, QUESTION)
    assert found["report"] == expected, "the page's report is not the command line's"
    return {**found["times"], "processor": processor_seconds() - before}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="build/page")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-m", "zeroplan", "estimate", MODEL, "--gpus", "8", "--gpu", "H100", "--json"]
    expected = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=options.folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(300_000)
        page.goto(f"http://127.0.0.1:{server.server_port}/icon.svg")  # of the same origin, without the page's own worker
        before, begin = processor_seconds(), time.perf_counter()
        names = page.evaluate(START)
        load = {"wall": time.perf_counter() - begin, "processor": processor_seconds() - before}
        first, *warm = [measured(page, expected) for _ in range(options.runs + 1)]
        browser.close()
    server.shutdown()
    median = {name: statistics.median(run[name] for run in warm) for name in first}
    result = {
        "compiled": names["compiled"],
        "rows": len(expected["plans"]),
        "load": load,
        "first": first,
        "median": median,
        "runs": options.runs,
    }
    print(f"load                     {load['wall']:5.1f} s wall, {load['processor']:5.1f} s of processor time")
    print(f"{'seconds after a question':24} {'formulas':>9} {'first row':>9} {'all rows':>9} {'answer':>9} {'processor':>9}")
    for name, run in (("the first", first), (f"median of {options.runs} more", median)):
        figures = (run[key] for key in ("formulas", "row", "rows", "answer", "processor"))
        print(f"{name:24} " + " ".join(f"{figure:9.2f}" for figure in figures))
    if not names["compiled"]:
        print("The page was made without a compiler: its allocator runs in Python.")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
