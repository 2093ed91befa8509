"""The version of DeepSpeed that a run has, as its log, its project's files or this Python's packages say it, and versions of
other packages that a project pins.

Only an exact version counts: ``deepspeed>=0.14`` says nothing of which one ran.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import read_tail
from zeroplan.logs.patterns import DEEPSPEED_SAID

#: What ``--deepspeed-version`` takes in place of a number for the package of this Python.
INSTALLED = "installed"
_NUMBER = r"(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)"
#: A pin of pip (also as an item of a list), of conda, and of Poetry.
_PIN = r"^[\s\-\"']*{}(?:\[[^\]]*\])?\s*={{1,3}}\s*[\"']?{}(?![\d.]*\*)"
#: Files that pin what a project runs with.
_PINNING = ("requirements*.txt", "pyproject.toml", "environment*.yml", "environment*.yaml")
_MOST_BYTES = 1 << 20
#: Folders above a file in which its repository's root is looked for.
_MOST_FOLDERS = 5


def version_in(text: str, package: str = "deepspeed") -> str | None:
    """Return the version that a text states, its last one: a log may hold several starts."""
    pin = re.compile(_PIN.format(package, _NUMBER), re.MULTILINE | re.IGNORECASE)
    found = [match for kind in (pin, DEEPSPEED_SAID) if kind is pin or package == "deepspeed" for match in kind.finditer(text)]
    said = [(match.start(), str(match[match.lastindex or 1])) for match in found]
    return max(said)[1] if said else None


def pinned_version(folder: Path, package: str = "deepspeed") -> tuple[str, str] | None:
    """Return the version of a package that a file's project pins, and the file that does; None where none does.

    Args:
        folder: the file's. The folders above it are searched, too, up to its repository's root.
        package: its name.
    """
    for place in _project(folder):
        for pattern in _PINNING:
            for path in sorted(place.glob(pattern)):
                try:
                    text = path.read_bytes()[:_MOST_BYTES].decode("utf-8", "replace")
                except OSError:  # a folder of that name, or a file of another user
                    continue
                if (version := version_in(text, package)) is not None:
                    return version, path.name
    return None


def _project(folder: Path) -> Iterator[Path]:
    above = [folder, *folder.absolute().parents][:_MOST_FOLDERS]
    root = next((i for i, place in enumerate(above) if (place / ".git").exists()), 0)
    yield from above[: root + 1]


def requested_version(asked: str) -> tuple[str, str]:
    """Return the version that a user asks for, and which file or package states it, empty for a number.

    Args:
        asked: a number, a file that states one (a log, requirements.txt, pyproject.toml, …), or ``installed``.

    Raises:
        BadInput: a file or a Python without it.
    """
    where = "--deepspeed-version"
    if asked.strip().lower() == INSTALLED:
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("deepspeed"), "the installed package"
        except PackageNotFoundError:
            raise BadInput("DeepSpeed is not installed here", where=where, remedy="write the version: 0.14.2") from None
    if not Path(asked).is_file():
        return asked, ""
    data, _ = read_tail(asked, 64 * _MOST_BYTES, where=where, remedy="give a log, a requirements.txt, or the version: 0.14.2")
    found = version_in(data.decode("utf-8", "replace"))
    if found is None:
        raise BadInput(f"{asked} states no version of DeepSpeed", where=where, remedy="write it: 0.14.2")
    return found, asked
