"""Files that zeroplan wrote, by digests beside them: what somebody else wrote or changed is never written over."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import read_bytes, write_together

#: The file of a folder that holds the digests of what was written there, by name.
DIGESTS = ".zeroplan-written.json"
_MOST_BYTES = 16 << 20


def require_writable_over(paths: Iterable[str], texts: Mapping[str, str] | None = None, *, where: str = "--output") -> None:
    """Refuse to write over files that zeroplan did not write, or that were changed since.

    Args:
        paths: of the files.
        texts: what is to be written; a file that holds that already is no fault.
        where: the option that names them.

    Raises:
        BadInput: naming the first such file.
    """
    for path in paths:
        if not os.path.lexists(path) or os.path.isdir(path):
            continue
        found = read_bytes(path, _MOST_BYTES)
        if texts is not None and found == texts.get(path, "").encode():
            continue
        said = _digests(os.path.dirname(path)).get(os.path.basename(path))
        if said != hashlib.sha256(found).hexdigest():
            did = "was not written by recommend" if said is None else "was changed since recommend wrote it"
            raise BadInput(
                f"{path} is there already and {did}", where=where, remedy="name another place, or write over it by --force"
            )


def write_with_digests(texts: Mapping[str, str]) -> None:
    """Write files, and the digest of each beside it: all of them or, where one cannot be written, none.

    Raises:
        BadInput: naming the file that cannot be written.
    """
    folders: dict[str, dict[str, str]] = {}
    for path, text in texts.items():
        folder, name = os.path.split(path)
        folders.setdefault(folder, _digests(folder))[name] = hashlib.sha256(text.encode()).hexdigest()
    kept = {os.path.join(folder, DIGESTS): json.dumps(found, indent=1) + "\n" for folder, found in folders.items()}
    write_together({**texts, **kept})


def _digests(folder: str) -> dict[str, str]:
    path = os.path.join(folder, DIGESTS)
    try:
        found = json.loads(read_bytes(path, _MOST_BYTES))
    except (BadInput, ValueError):
        return {}
    return {str(name): str(digest) for name, digest in found.items()} if isinstance(found, dict) else {}
