"""The frame of every HTML report. A page holds its style and its scripts, so it loads no other file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from functools import cache
from html import escape
from importlib.resources import files


@cache
def asset(name: str) -> str:
    """Return the text of a file in ``report/assets``."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def look() -> str:
    """Return the style that every page shares, the local server's and the reports': colours, and the parts that all draw."""
    return asset("palette.css") + asset("parts.css")


def page(
    title: str, lead: str, body: Iterable[str], *, made: Mapping[str, str] | None = None, scripts: Iterable[str] = ()
) -> str:
    """Return a whole page, light or dark as the reader's system is or as the button in its head says.

    Args:
        title: what the page is of, as plain text.
        lead: the line below it, as plain text.
        body: fragments of HTML, in order; empty ones are left out.
        made: the ``command`` that made the page and the tool's ``version``; with them stands the date.
        scripts: the assets that run once the body is there, in order.
    """
    by = ""
    if made is not None:
        command = f"<code>{escape(made['command'])}</code>"
        by = f"<p class='made'>Made by {command}, zeroplan {made['version']}, on {date.today()}.</p>"
    run = "".join(f"<script>{asset(name)}</script>" for name in ("page.js", *scripts))
    return "\n".join(
        [
            "<!doctype html>",
            "<html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{escape(title)}</title><style>{look()}{asset('page.css')}</style></head><body>",
            "<header><div><h1>" + escape(title) + "</h1>",
            f"<p class='lead'>{escape(lead)}</p>{by}</div>",
            "<button type='button' id='theme' aria-label='Light or dark'>◐</button></header><main>",
            *filter(None, body),
            "<footer>1 GiB = 2<sup>30</sup> bytes. A GPU is the one that needs the most.</footer>",
            f"</main>{run}</body></html>\n",
        ]
    )
