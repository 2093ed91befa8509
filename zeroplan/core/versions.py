"""The versions that predictions are held against, stated once, and how a version is read."""

from __future__ import annotations

import re

from zeroplan.core.errors import BadInput

#: The torch of the measured GPU runs.
TORCH_GPU = "2.11.0"
TRANSFORMERS = "5.17.0"

Version = tuple[int, int, int]


def parse_version(text: str, where: str = "engine version") -> Version:
    """Parse ``"0.19.8"`` to ``(0, 19, 8)``; what follows the third number is left out.

    Raises:
        BadInput: when the text is no version.
    """
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", text, re.ASCII)
    if not match:
        raise BadInput(f"{text[:40]!r} is not a version", where=where, remedy="write it as 0.14.2")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def version_text(version: Version) -> str:
    """Return ``"0.14.2"``."""
    return ".".join(map(str, version))
