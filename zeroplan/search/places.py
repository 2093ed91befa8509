"""The places that ``recommend`` writes to: refused before the search where they cannot be written."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import require_writable
from zeroplan.interop.forms.configuration import DS_CONFIG


def require_places(*paths: str | None) -> None:
    """Refuse, before any search, places that could not be written after it. A path that ends with a slash is a folder to be
    made, in which the others may lie.
    """
    given = [path for path in paths if path]
    made = {os.path.normpath(path) for path in given if path.endswith(os.sep)}
    for path in given:
        if os.path.isdir(path):
            require_writable(os.path.join(path, DS_CONFIG))
        elif path.endswith(os.sep):
            folder, above = os.path.normpath(path), os.path.dirname(os.path.normpath(path))
            if os.path.lexists(folder):
                raise BadInput("is a file, not a folder", where=path, remedy="name another folder")
            if above and not os.path.isdir(above):
                raise BadInput(f"there is no folder {above}", where=path, remedy="make it, or name another")
        elif os.path.normpath(os.path.dirname(path)) not in made:
            require_writable(path)


def require_not_read(source: Sequence[str], *paths: str | None) -> None:
    """Refuse to write over a file that is read: its rates and schedules are in nothing that is written."""
    read = {os.path.realpath(path) for path in source}
    for path in paths:
        if path is not None and os.path.realpath(path) in read:
            what = f"{path} is what --from reads, and what is written holds nothing of its rates and schedules"
            raise BadInput(what, where="--output", remedy="name another file, and add them there")
