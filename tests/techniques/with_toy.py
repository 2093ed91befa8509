"""Runs zeroplan's command line, or the page's answer to a question, with the toy's row in the table."""

from __future__ import annotations

import json
import sys

from tests.techniques.toy import SoftPromptTechnique
from zeroplan.techniques import table

table.TABLE.append(SoftPromptTechnique())

if __name__ == "__main__":
    if sys.argv[1] == "page":
        from zeroplan.ui.answers import answer

        print(json.dumps(answer(json.loads(sys.argv[2]))))
    else:
        from zeroplan.cli.main import run

        run()
