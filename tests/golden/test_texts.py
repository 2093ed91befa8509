"""What the commonest requests print is what was read and found good: ``python -m tests.golden.texts`` makes it anew."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.texts import QUICK, REQUESTS, kept
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("requests", ["QUICK", pytest.param("REQUESTS", marks=pytest.mark.long)])
def test_texts_are_those_that_were_read(requests: str) -> None:
    """In a process of its own, which other tests have not given torch."""
    code = f"import tests.golden.texts as t; found = t.differing(t.{requests}); print(chr(10).join(found)); exit(bool(found))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_memory_beside_its_limit_has_one_form() -> None:
    """``54.7 of 79.1 GiB``: in the answer of every verb, layouts and the doctor's plan among them."""
    shown = {verb: text for verb, text in kept().items() if " of 79.1 GiB a GPU" in text}
    assert {line.split()[0] for line in shown} >= {"estimate", "recommend", "check", "doctor"}
    assert any("--layouts" in line for line in shown)
    for line, text in kept().items():
        assert not re.search(r"[KMGT]iB of \d", text), line


def test_first_screens_hold_what_a_screen_holds() -> None:
    """12 lines of one plan and 20 of a list; a difference of files and what was written come on top."""
    texts = kept()
    assert set(texts) == set(REQUESTS)
    assert set(QUICK) <= set(REQUESTS)
    for line, text in texts.items():
        lines = text.splitlines()[1:]
        assert all(len(one) <= 80 for one in lines if not one.startswith("zeroplan: ")), line
        one = line.startswith("estimate") and "--stage" in line
        if (
            line.startswith(("estimate", "recommend"))
            and "--from" not in line
            and "-o " not in line
            and "--layouts" not in line
        ):
            assert len(lines) - text.count("[exit") <= (12 if one else 20), line
