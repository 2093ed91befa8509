"""The frame of every HTML report. A page holds its style and its script, so it loads no other file."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files


@cache
def asset(name: str) -> str:
    """Return the text of a file in ``report/assets``."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def page(title: str, body: Iterable[str], *, script: str = "") -> str:
    """Return a whole page.

    Args:
        title: the tab's title, as plain text.
        body: fragments of HTML, in order; empty ones are left out.
        script: the asset that runs once the body is there.
    """
    run = f"<script>{asset(script)}</script>" if script else ""
    return "\n".join(
        [
            "<!doctype html>",
            "<html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{escape(title)}</title><style>{asset('page.css')}</style></head><body><main>",
            *filter(None, body),
            f"</main>{run}</body></html>\n",
        ]
    )
