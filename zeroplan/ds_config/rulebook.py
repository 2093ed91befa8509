"""The rules run over one config."""

from __future__ import annotations

from collections.abc import Iterator

from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.findings import Finding
from zeroplan.ds_config.rules import View
from zeroplan.ds_config.rules_autoep import AUTOEP_REFUSALS
from zeroplan.ds_config.rules_config import CONFIG_REFUSALS
from zeroplan.ds_config.rules_engine import ENGINE_REFUSALS
from zeroplan.ds_config.rules_notes import REMARKS
from zeroplan.ds_config.rules_runtime import RUNTIME_REFUSALS

RULES = (*CONFIG_REFUSALS, *ENGINE_REFUSALS, *AUTOEP_REFUSALS, *REMARKS, *RUNTIME_REFUSALS)


def run_rules(view: View, dialect: Dialect) -> Iterator[Finding]:
    """Return the findings of every rule that holds of the dialect's program and applies to the config."""
    for rule in RULES:
        if dialect in rule.dialects and rule.applies(view):
            yield rule.finding(view)
