"""Takes the screenshots of the docs: the reports of ``estimate`` and ``recommend``, light, dark and on a phone.

``python docs/screenshots.py`` writes ``docs/pictures/*.png``. It needs playwright and a Chromium at ``/usr/bin/chromium``; how
letters are drawn depends on the machine, so nothing checks that the files are the latest.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
CHROMIUM = "/usr/bin/chromium"
MODEL = "meta-llama/Llama-3.1-8B"
#: The commands whose pages are shown.
PAGES = {
    "report": ("estimate", MODEL, "--gpus", "8", "--gpu", "H100"),
    "recommend": ("recommend", MODEL, "--gpus", "8", "--gpu", "A100-40G", "--cpu-ram", "512G"),
}
#: Each screenshot: the page, the colours, width and height in pixels, and what is opened first.
SHOTS = {
    "report_light.png": ("report", "light", 1000, 1010, ""),
    "report_dark.png": ("report", "dark", 1000, 1010, ""),
    "report_phone.png": ("report", "dark", 390, 900, ""),
    "report_beside.png": ("report", "light", 1000, 820, "beside"),
    "recommend_light.png": ("recommend", "light", 1000, 1200, ""),
    "recommend_phone.png": ("recommend", "light", 390, 900, ""),
}
#: Bytes that no screenshot may exceed.
_MOST = 150_000


def main() -> None:
    """Write every screenshot."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        for name, words in PAGES.items():
            page = Path(folder) / f"{name}.html"
            subprocess.run([sys.executable, "-m", "zeroplan", *words, "--html", page, "-q"], cwd=ROOT, check=True)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name in SHOTS:
            _shoot(browser, Path(folder), name)
        browser.close()


def _shoot(browser: Browser, folder: Path, name: str) -> None:
    page_name, colours, width, height, opened = SHOTS[name]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=colours,
        reduced_motion="reduce",  # type: ignore[arg-type]
    )
    page = context.new_page()
    page.goto(f"file://{folder}/{page_name}.html{f'#{opened}' if opened else ''}")
    page.wait_for_timeout(400)  # charts are drawn once their places have a size
    page.screenshot(path=FOLDER / name)
    context.close()
    size = (FOLDER / name).stat().st_size
    if size > _MOST:
        raise SystemExit(f"{name} has {size:,} bytes, more than {_MOST:,}")
    print(f"{name}: {size:,} bytes")


if __name__ == "__main__":
    main()
