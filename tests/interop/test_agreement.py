"""Our verdict on a config is DeepSpeed's: its parser's, its engine's, and the wrapper that it builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from agreement_cases import CASES

from zeroplan.interop.ds_config import At, DsConfig, Severity, Wrapper, inspect_ds_config

Verdicts = dict[str, dict[str, Any]]


def refusals(config: DsConfig, *at: At) -> list[str]:
    return [f.id for f in config.of_severity(Severity.ERROR, Severity.OPEN) if f.at in at]


@pytest.fixture(scope="module")
def verdicts(oracle: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Verdicts:
    return dict(zip(CASES, oracle([config for config, _ in CASES.values()]), strict=True))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_verdict_equals_deepspeeds(name: str, verdicts: Verdicts) -> None:
    config, _ = CASES[name]
    ours, theirs = inspect_ds_config(config, world_size=1), verdicts[name]
    assert (not refusals(ours, At.CONFIG)) == theirs["parses"], (refusals(ours, At.CONFIG), theirs["error"])
    if theirs["parses"]:
        assert (not refusals(ours, At.ENGINE)) == theirs["builds"], (refusals(ours, At.ENGINE), theirs["error"])
    if theirs["builds"] and not ours.errors:
        built = Wrapper.NONE if theirs["wrapper"] == theirs["basic"] else theirs["wrapper"]
        assert ours.wrapper == built


@pytest.mark.parametrize("name", CASES)
def test_the_reason_is_named(name: str) -> None:
    config, rule = CASES[name]
    found = refusals(inspect_ds_config(config, world_size=1), *At)
    assert (rule in found) if rule else not found, found
