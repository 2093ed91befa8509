"""The answer of ``check`` as text and JSON: whether DeepSpeed runs a ds_config, what it does otherwise, and every key."""

from __future__ import annotations

from typing import Any

from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan.ds_config.findings import Severity
from zeroplan.ds_config.reader import DsConfig
from zeroplan.ds_config.schema import Effect

_TITLES = {
    Severity.ERROR: "DeepSpeed refuses",
    Severity.OPEN: "Left open: refused alone, filled by the HF Trainer, Lightning or a flag",
    Severity.WARNING: "Runs otherwise than it says",
    Severity.NOTE: "Worth knowing",
}
_LONGEST_LINE, _LONGEST_KEY = 400, 200
#: Keys that one group lists.
_MOST_KEYS = 200


def verdict(config: DsConfig) -> str:
    """Return one sentence: whether DeepSpeed runs the file, at which stage, with which offload, dtype and optimizer class."""
    name = f"DeepSpeed {DEEPSPEED_VERSION}"
    if config.errors:
        count = len(config.errors)
        return f"{name} refuses this file: {count} error{'s' if count > 1 else ''}."
    does = f"stage {config.zero.stage}"
    if config.zero.stage and config.zero.offload_optimizer:
        device = config.zero.offload_optimizer.device if config.zero.stage == 3 else "cpu"
        does += f", optimizer on {device}"
    if config.zero.offloads_param:
        does += f", parameters on {config.zero.offload_param.device}"
    if config.training.dtype is not None and config.wrapper is not None:
        built = "the optimizer as it is" if config.wrapper == "none" else config.wrapper
        does += f", {config.training.dtype}; it builds {built}"
    if config.runs_alone:
        return f"{name} runs this file as it is: {does}."
    return f"{name} alone refuses this file; once what is open is filled, it runs: {does}."


def check_json(config: DsConfig) -> dict[str, Any]:
    """Return the verdict, the findings and the keys as one object that JSON can hold."""
    return {
        "schema": 1,
        "file": config.source,
        "engine_version": DEEPSPEED_VERSION,
        "runs": config.runs_filled,
        "runs_alone": config.runs_alone,
        "verdict": verdict(config),
        "stage": config.zero.stage,
        "offload_optimizer": config.zero.offload_optimizer.device.value,
        "offload_param": config.zero.offload_param.device.value,
        "wrapper": None if config.wrapper is None else config.wrapper.value,
        "findings": [
            {
                "id": finding.id,
                "severity": finding.severity.value,
                "where": finding.where,
                "what": finding.what,
                "remedy": finding.remedy,
                "raised_at": finding.at.value,
                "source": finding.source,
            }
            for finding in config.findings
        ],
        "unresolved_auto": list(config.unresolved_auto),
        "keys": [{"key": key.path, "effect": key.effect.value, "note": key.note} for key in config.keys],
    }


def check_text(config: DsConfig) -> str:
    """Return the verdict, the findings by severity, and the keys grouped by their effect on memory."""
    lines = [_one_line(f"{config.source}: {verdict(config)}")]
    for severity, title in _TITLES.items():
        found = config.of_severity(severity)
        if found:
            lines += ["", f"{title} ({len(found)})", *(f"  {_one_line(finding)}" for finding in found)]
    for effect in Effect:
        paths = [key.path for key in config.keys if key.effect is effect]
        if paths:
            lines += ["", f"Keys: {effect.value} ({len(paths):,})", *_wrapped(paths[:_MOST_KEYS])]
            lines += [f"  and {len(paths) - _MOST_KEYS:,} more"] if len(paths) > _MOST_KEYS else []
    return "\n".join(lines)


def _one_line(finding: object) -> str:
    text = "".join(ch if ch.isprintable() else " " for ch in str(finding))
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 3] + "..."


def _wrapped(paths: list[str], width: int = 100) -> list[str]:
    lines, line = [], " "
    for path in paths:
        shown = "".join(ch if ch.isprintable() else " " for ch in path)[:_LONGEST_KEY]
        if len(line) + len(shown) + 2 > width and line.strip():
            lines.append(line.rstrip())
            line = " "
        line += f" {shown},"
    return [*lines, line.rstrip(",")] if line.strip() else lines
