"""The code of a Jupyter notebook, its cells one after the other, without what only IPython runs."""

from __future__ import annotations

from zeroplan.core.documents import parse_json
from zeroplan.core.errors import BadInput


def code_of(text: str, name: str) -> str:
    """Return the Python of a notebook: shell commands, magics and questions are taken out, and cells of other languages.

    Raises:
        BadInput: it is no notebook.
    """
    data = parse_json(text, name)
    cells = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(cells, list):
        raise BadInput("holds no cells", where=name, remedy="give a notebook of version 4, or its script")
    parts = []
    for cell in cells:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source")
        lines = source if isinstance(source, list) else str(source or "").splitlines(keepends=True)
        code = "".join(line for line in map(str, lines))
        if code.lstrip().startswith("%%") and not code.lstrip().startswith(("%%time", "%%capture")):
            continue
        kept = (_plain(line) for line in code.splitlines())
        parts.append("\n".join(kept))
    return "\n".join(parts) + "\n"


def _plain(line: str) -> str:
    """A line that Python can read: one of IPython's own becomes ``pass``, so that lines keep their numbers."""
    bare = line.lstrip()
    own = bare.startswith(("!", "%", "?")) or bare.endswith("?")
    return line[: len(line) - len(bare)] + "pass" if own else line
