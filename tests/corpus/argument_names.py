"""Makes the lists of argument names that ``zeroplan/interop/programs/keys`` holds, from programs' own sources.

    python -m tests.corpus.argument_names NAME "TITLE VERSION" FILE.py:CLASS[,CLASS] … > zeroplan/interop/programs/keys/NAME.txt

Fields with a type are listed, in any class that is named, by reading the source; no program is run. A name that the list does
not have yet gets a question mark: put a star in its place where the argument moves memory, else nothing. The tests refuse a
list with a question mark in it.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from zeroplan.interop.programs.known import LISTED, moving_in, names_in


def field_names(source: str, classes: frozenset[str]) -> set[str]:
    """The typed fields of the classes; of all classes where none is named."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and (not classes or node.name in classes):
            typed = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            found |= {target.id for target in typed if isinstance(target, ast.Name) and not target.id.startswith("_")}
    return found


def main() -> None:
    name, title, *sources = sys.argv[1:]
    names: set[str] = set()
    for one in sources:
        path, _, classes = one.partition(":")
        names |= field_names(Path(path).read_text(), frozenset(filter(None, classes.split(","))))
    print(f"# {name}: arguments of {title}, one a line.")
    known, moving = (names_in(name), moving_in(name)) if name in LISTED else (frozenset(), frozenset())
    print("\n".join(one + (" *" if one in moving else "" if one in known else " ?") for one in sorted(names)))


if __name__ == "__main__":
    main()
