"""Defaults that moved between DeepSpeed's versions, found in its history; everything else is as in 0.19.8."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.zero_config import DEEPSPEED_VERSION

Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class DefaultChange:
    """The key at `path` had the default `before` in every version before `since`."""

    path: str
    since: Version
    before: Any
    commit: str


#: Checked in DeepSpeed's repository: the commit that changed it and the version.txt beside it.
DEFAULT_CHANGES: tuple[DefaultChange, ...] = (
    DefaultChange("gradient_clipping", (0, 19, 3), 0.0, "442166559"),
    DefaultChange("bf16.check_grad_overflow", (0, 19, 3), False, "f0253c866"),
    DefaultChange("zero_optimization.offload_optimizer.pin_memory", (0, 19, 5), False, "7dfa67aea"),
    DefaultChange("zero_optimization.offload_param.pin_memory", (0, 19, 5), False, "7dfa67aea"),
)


def parse_version(text: str) -> Version:
    """Parse ``"0.19.8"`` to ``(0, 19, 8)``; what follows the third number is left out.

    Raises:
        BadInput: when the text is no version.
    """
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", text, re.ASCII)
    if not match:
        raise BadInput(f"{text[:40]!r} is not a version", where="engine version", remedy=f"write it as {DEEPSPEED_VERSION}")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def older_defaults(version: str) -> dict[str, Any]:
    """Return the defaults of `version` that differ from those of 0.19.8, by dotted path.

    Raises:
        BadInput: when `version` is no version.
    """
    asked = parse_version(version)
    return {change.path: change.before for change in DEFAULT_CHANGES if asked < change.since}
