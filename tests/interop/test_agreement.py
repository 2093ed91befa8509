"""Our verdict on a config is DeepSpeed's: its parser's, its engine's, and the wrapper that it builds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from agreement_cases import CASES, random_config

from zeroplan.ds_config.findings import At, Severity
from zeroplan.ds_config.reader import DsConfig, inspect_ds_config
from zeroplan.ds_config.wrappers import Wrapper

Verdict = dict[str, Any]
Verdicts = dict[str, Verdict]
Oracle = Callable[[list[dict[str, Any]]], list[Verdict]]


def refusals(config: DsConfig, *at: At) -> list[str]:
    return [f.id for f in config.of_severity(Severity.ERROR, Severity.OPEN) if f.at in at]


@pytest.fixture(scope="module")
def verdicts(oracle: Oracle) -> Verdicts:
    return dict(zip(CASES, oracle([config for config, _ in CASES.values()]), strict=True))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_verdict_equals_deepspeeds(name: str, verdicts: Verdicts) -> None:
    assert_agrees(CASES[name][0], verdicts[name])


@pytest.mark.torch
@pytest.mark.slow
def test_verdicts_on_random_combinations(oracle: Oracle) -> None:
    """Seeded, so that a failure repeats; a run of 1,050 such configs found no difference."""
    configs = [random_config(random.Random(seed)) for seed in range(120)]
    answers = oracle(configs)
    built = sum(answer["builds"] for answer in answers)
    assert 20 < built < 100, "the draw should hold both kinds"
    for config, theirs in zip(configs, answers, strict=True):
        assert_agrees(config, theirs)


def assert_agrees(config: dict[str, Any], theirs: Verdict) -> None:
    ours = inspect_ds_config(config, world_size=1)
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
