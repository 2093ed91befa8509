"""A script that ends by itself: what it said as it did."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from zeroplan.capturing.hooks.imports import changes

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture


def install(capture: Capture) -> None:
    """Note what argparse says of arguments that it refuses."""
    parser: Any = argparse.ArgumentParser
    changes(parser)
    own = parser.error

    def error(self: Any, message: str) -> Any:
        capture.last_words = f"its arguments are refused: {' '.join(message.split())[:200]}"
        return own(self, message)

    parser.error = error
