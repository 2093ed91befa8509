"""One answer everywhere: of a request drawn at random no two verbs disagree on what fits, host, best or speed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.one_answer import SMALL, disagreements

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("seed", range(6))
def test_no_two_verbs_disagree(seed: int, cli: Cli) -> None:
    assert not disagreements(cli, [20261128 + seed], SMALL)


@pytest.mark.long
@pytest.mark.parametrize("tens", range(15))
def test_no_two_verbs_disagree_on_150_requests(tens: int, cli: Cli) -> None:
    assert not disagreements(cli, range(20270000 + 10 * tens, 20270010 + 10 * tens))
