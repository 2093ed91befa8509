"""All rules, run over one config."""

from __future__ import annotations

from collections.abc import Iterator

from zeroplan.ds_config.findings import Finding
from zeroplan.ds_config.rules import View
from zeroplan.ds_config.rules_config import CONFIG_REFUSALS
from zeroplan.ds_config.rules_engine import ENGINE_REFUSALS
from zeroplan.ds_config.rules_notes import REMARKS


def run_rules(view: View) -> Iterator[Finding]:
    """The findings of every rule that applies."""
    for rule in (*CONFIG_REFUSALS, *ENGINE_REFUSALS, *REMARKS):
        if rule.applies(view):
            yield rule.finding(view)
