"""Runs a notebook's cells as one script, without what IPython adds: magics, commands of a shell, and help."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import linecache
import re
from pathlib import Path
from typing import Any

from zeroplan.capturing.hooks.reporters import Nothing
from zeroplan.capturing.loops import compiled

#: Magics of a whole cell whose code is Python, to be run.
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%python3", "%%memit")
_LINE = re.compile(r"^(\s*)([!%].*|[\w.()]+\?{1,2})\s*$")
_ASSIGNED = re.compile(r"^(\s*[\w, ]+=\s*)[!%].*$")
_WRITES = re.compile(r"^%%(?:writefile|file)\s+(-a\s+)?(\S+)")


def run(path: str) -> None:
    """Run the notebook's code; a cell's lines are named ``PATH[NUMBER]``."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": path, "get_ipython": Nothing, "display": Nothing()}
    for number, cell in enumerate(json.loads(Path(path).read_text(encoding="utf-8"))["cells"], 1):
        if cell.get("cell_type") == "code":
            name = f"{path}[{number}]"
            text = python_of("".join(cell["source"]))
            linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
            code = compiled(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            ran = eval(code, names)
            if inspect.iscoroutine(ran):
                asyncio.run(ran)


def python_of(cell: str) -> str:
    """Return a cell's text as Python: magics do nothing, and what they would return is an empty list.

    A cell that writes a file writes it; one in another language does nothing.
    """
    first, _, rest = cell.lstrip().partition("\n")
    if found := _WRITES.match(first):
        return f"with open({found[2]!r}, {'a' if found[1] else 'w'!r}) as _file:\n    _file.write({rest!r})\n"
    if first.startswith("%%") and first.split()[0] not in _PYTHON_CELLS:
        return ""
    lines = []
    for line in cell.splitlines():
        plain = _LINE.match(line) or (first.startswith("%%") and line.startswith("%%"))
        assigned = _ASSIGNED.match(line)
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(f"{indent}pass" if plain else f"{assigned[1]}[]" if assigned else line)
    return "\n".join(lines) + "\n"
