from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool()
    yield made
    made.stop()
