"""The pages' style and script are files of the package, and a page carries them itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import zeroplan
from tests.patience import PATIENCE
from zeroplan.report.page import asset, page
from zeroplan.report.palette import palette

ROOT = Path(__file__).resolve().parents[2]
Cli = Callable[..., tuple[int, str, str]]


def test_a_page_needs_no_other_file() -> None:
    text = page("<gpt2>", "2 GPUs & more", ["<p>fits</p>", ""], scripts=["timeline.js"])
    assert "<title>&lt;gpt2&gt;</title>" in text
    assert asset("page.css") in text
    assert asset("palette.css") in text
    assert "2 GPUs &amp; more" in text
    assert asset("timeline.js") in text
    assert "src=" not in text
    assert "href=" not in text


def test_every_colour_is_one_of_the_palettes() -> None:
    """The page's style and the reports' name colours that stand in one file."""
    colours = palette()
    assert len(colours) > 10
    styles = [asset("page.css"), asset("parts.css"), (ROOT / "zeroplan" / "ui" / "static" / "style.css").read_text()]
    documentation = (ROOT / "docs" / "extra.css").read_text()
    assert set(re.findall(r"#[0-9a-f]{3,6}\b", documentation)) <= {one for pair in colours.values() for one in pair}
    assert not re.search(r": [^;{]*#[0-9a-f]{3}", asset("notebook.css"))
    for style in styles:
        assert "light-dark(#" not in style
        assert style.count("{") == style.count("}")
        used = set(re.findall(r"var\(--(ink|faint|line|paper|ground|field|accent|on-accent|good|bad|unsure)\b", style))
        assert len(used) > 5
        assert used <= set(colours)


def test_both_reports_are_pages(cli: Cli, tmp_path: Path) -> None:
    pages = [tmp_path / "estimate.html", tmp_path / "recommend.html"]
    words = ("openai-community/gpt2", "--gpus", "2", "--vram", "16G")
    assert cli("estimate", *words, "--html", str(pages[0]))[0] == 0
    assert cli("recommend", *words, "--html", str(pages[1]))[0] == 0
    for one in pages:
        text = one.read_text()
        assert asset("page.css") in text
        assert asset("parts.css") in text
        # Who made it, with what and when: a page is read without its command beside it.
        command = f"zeroplan {one.stem} openai-community/gpt2 --gpus 2 --vram 16G --html {one}"
        assert f"<code>{command}</code>, zeroplan {zeroplan.__version__}, on 20" in text
        # What scrolls can be reached by keyboard, no header is empty, and no picture with links calls itself an image.
        for tag in re.findall(r"<div class='(?:scroll|scatter)'[^>]*>", text):
            assert "tabindex='0'" in tag
            assert "aria-label=" in tag
        assert "<th></th>" not in text
        for drawn in re.findall(r"<svg[^>]*role='img'.*?</svg>", text, re.DOTALL):
            assert "<a " not in drawn


def test_on_paper_a_page_is_light_and_breaks_between_parts() -> None:
    printed = asset("parts.css").partition("@media print")[2] + asset("page.css").partition("@media print")[2]
    for rule in (
        "color-scheme: light",
        "print-color-adjust: exact",
        ".card { break-inside: avoid; }",
        ".card.plan { break-inside: auto; }",
    ):
        assert rule in printed


def test_text_of_a_console_in_the_documentation_is_legible() -> None:
    """Against the theme's grounds of code, a contrast of 4.5 or more."""
    text = (ROOT / "docs" / "extra.css").read_text()
    light, dark = re.findall(r"--md-code-hl-generic-color: (#\w+)", text)
    for ink, ground in ((light, "#f5f5f5"), (dark, "#272b35")):
        one, two = sorted(map(_luminance, (ink, ground)), reverse=True)
        assert (one + 0.05) / (two + 0.05) >= 4.5


def _luminance(colour: str) -> float:
    """Relative luminance, by WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_version_is_the_same_wherever_it_stands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert project["version"] == zeroplan.__version__ == cited[1]


def test_the_wheel_without_compiled_code(tmp_path: Path) -> None:
    """It carries every file of the packages and the kernels' sources, nothing else, and is small."""
    build = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 15_000_000
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for package in ("zeroplan", "zeroplan_runtime") for path in (ROOT / package).rglob("*") if path.is_file()]
    names = {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".pyc", ".so")}
    assert {"zeroplan/report/assets/page.css", "zeroplan/report/assets/plot.js", "zeroplan/py.typed"} <= names
    kernels = {f"zeroplan_runtime/kernels/cuda/{path.name}" for path in (ROOT / "csrc" / "cuda").iterdir()}
    assert "zeroplan_runtime/kernels/cuda/common.cuh" in kernels
    assert held == names | kernels, held ^ (names | kernels)
