"""The pages that people write stay few and short: what is added to one is paid by what goes."""

from __future__ import annotations

import re

from docs.generate import PAGES, ROOT

#: All pages but those that docs/generate.py writes whole, and of each all but the parts that it fills.
WRITTEN = [path for path in sorted(ROOT.rglob("*.md")) if path.parent != ROOT or path.name not in PAGES]
MADE = re.compile(r"<!-- made: \w+ -->.*?<!-- end -->", re.DOTALL)


def test_pages_written_by_hand_are_few_and_short() -> None:
    words = {path.relative_to(ROOT).as_posix(): len(MADE.sub("", path.read_text()).split()) for path in WRITTEN}
    assert len(words) <= 45
    assert sum(words.values()) <= 60_000, sorted(words.items(), key=lambda item: -item[1])[:10]
