"""The documentation lists the page that needs no server, once it has been made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / "docs" / "try_it.py"


@pytest.mark.parametrize("made", [True, False])
def test_the_documentation_holds_the_page_once_it_is_made(made: bool, tmp_path: Path) -> None:
    commands = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    for page in ("index.md", "more.md"):
        (tmp_path / "docs" / page).parent.mkdir(exist_ok=True)
        (tmp_path / "docs" / page).write_text("# A page\n")
    if made:
        (tmp_path / "page").mkdir()
        (tmp_path / "page" / "index.html").write_text("the page")
    settings = tmp_path / "mkdocs.yml"
    settings.write_text(f"site_name: x\nstrict: true\nextra: {{page: page}}\nhooks: [{HOOK}]\nnav: [index.md, more.md]\n")
    commands.build(config.load_config(str(settings)))
    site = tmp_path / "site"
    for text, link in (((site / "index.html").read_text(), "try/"), ((site / "more" / "index.html").read_text(), "../try/")):
        assert re.findall(r'href="([^"]*)"[^>]*>\s*Try it\s*<', text) == ([link] if made else [])
    assert (site / "try" / "index.html").exists() is made


def test_making_the_page_installs_a_compiler_alone() -> None:
    """It packs files as they are, so it needs neither the package nor what tests need."""
    root = HOOK.parents[1]
    rule = re.search(r"^\$\(VENV\)/\.page: (.*)\n((?:\t.*\n)+)", (root / "Makefile").read_text(), re.MULTILINE)
    assert rule is not None
    assert rule[1] == "requirements-dev.txt"
    taken = re.search(r"grep -E '(.*)' requirements-dev.txt", rule[2])
    assert taken is not None
    lines = (root / "requirements-dev.txt").read_text().splitlines()
    assert {line.partition("==")[0] for line in lines if re.search(taken[1], line)} == {"ziglang", "PyYAML"}
