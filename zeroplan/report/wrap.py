"""Text in lines of limited length, where a number stays with its unit."""

from __future__ import annotations

import re
import textwrap

_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|B|%|s|ms|tokens/s|keys|GPUs?)(?:\W|$))")
_GLUE = "\u00a0"


def wrap(text: str, width: int, *, indent: str = "", hang: str = "", words: bool = True) -> list[str]:
    """Return the text in lines of at most `width` characters.

    Args:
        text: one paragraph.
        width: characters, the indentation included.
        indent, hang: what the first line and the others begin with.
        words: whether a word that is longer than a line stays whole, so that its line is longer. A call of a function may be
            broken after its bracket.
    """
    room = width - max(len(indent), len(hang))
    text = " ".join(word if len(word) <= room else word.replace("(", "( ") for word in text.split(" "))
    lines = textwrap.wrap(
        _UNIT.sub(_GLUE, text),
        width,
        initial_indent=indent,
        subsequent_indent=hang,
        break_long_words=not words,
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in lines] or [indent.rstrip()]
