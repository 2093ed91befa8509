"""The server's other process: answers questions one after another, so that one which takes too long can be ended.

Standard input and output carry JSON, a line each way: a question; then what is done so far, as
:data:`zeroplan.ui.answers.Say` says; last ``{"answer": …}``. What a library prints goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Any, BinaryIO

#: Environment variable by which the server says that the hub may be asked.
HUB = "ZEROPLAN_UI_HUB"


def serve(questions: BinaryIO, answers: BinaryIO, *, hub: bool) -> None:
    """Answer every line of `questions` until there are no more."""
    from zeroplan.ui.answers import answer_text

    def send(text: str) -> None:
        answers.write(text.encode() + b"\n")
        answers.flush()

    def say(message: dict[str, Any]) -> None:
        send(json.dumps(message, separators=(",", ":")))

    for line in questions:
        try:
            send(f'{{"answer":{answer_text(line, say, hub=hub)}}}')
        except Exception as fault:  # of ours: the page says so, and the terminal shows where
            traceback.print_exc()
            text = f"zeroplan failed with {type(fault).__name__}; please report it with what the terminal shows"
            say({"answer": {"error": {"text": text, "what": text, "where": "", "remedy": ""}}})


def main() -> None:
    """Run the process: the real standard output is the server's, and whatever else is printed goes to standard error."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.set_threshold(50_000, 20, 100)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, answers, hub=os.environ.get(HUB) == "1")


if __name__ == "__main__":
    main()
