"""The campaign of test_one_answer.py goes on with other requests. A file's tests are one worker's, and this is another file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.one_answer import disagreements

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.long
@pytest.mark.parametrize("tens", range(15, 30))
def test_no_two_verbs_disagree_on_150_further_requests(tens: int, cli: Cli) -> None:
    assert not disagreements(cli, range(20270000 + 10 * tens, 20270010 + 10 * tens))
