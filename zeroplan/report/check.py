"""The answer of ``check`` as text and JSON: whether DeepSpeed or the included runtime runs a ds_config, and every key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroplan.core.versions import version_text
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.findings import Finding, Severity
from zeroplan.ds_config.reader import DsConfig
from zeroplan.ds_config.schema import MemoryEffect
from zeroplan.report.terminal import PLAIN, Terminal

_TITLES = {
    Severity.ERROR: "{program} refuses",
    Severity.OPEN: "Left open: refused alone, filled by the HF Trainer, Lightning or a flag",
    Severity.WARNING: "Runs otherwise than it says",
    Severity.NOTE: "Worth knowing",
}
_LONGEST_LINE, _LONGEST_KEY = 400, 200
#: Keys that one group lists.
_MOST_KEYS = 200


#: Ids of findings on an ``auto`` that the program which starts DeepSpeed fills.
_AUTO = "auto."


def verdict(config: DsConfig, filler: str = "", *, builds: bool = True) -> str:
    """Return one sentence: whether the program runs the file, at which stage, with which offload and dtype, and if `builds`
    the optimizer class that it makes.

    A file with ``auto`` is judged as the program that fills it: `filler`, or where none is known the HF Trainer or Lightning.
    """
    name = _program(config)
    if config.errors:
        count = len(config.errors)
        return f"{name} refuses this file: {count} error{'s' if count > 1 else ''}."
    does = f"stage {config.zero.stage}"
    if config.zero.stage and config.zero.offload_optimizer:
        device = config.zero.offload_optimizer.device if config.zero.stage == 3 else "cpu"
        does += f", optimizer on {device}"
    if config.zero.offloads_param:
        does += f", parameters on {config.zero.offload_param.device}"
    if builds and config.training.dtype is not None and config.wrapper is not None:
        built = "the optimizer as it is" if config.wrapper == "none" else config.wrapper
        does += f", {config.training.dtype}; it builds {built}"
    elif config.training.dtype is not None:
        does += f", {config.training.dtype}"
    warned = len(_shown(config, Severity.WARNING, wide=False))
    fine = "OK" + (f", with {warned} warning{'s' if warned > 1 else ''}" if warned else "")
    if config.runs_alone:
        return f"{fine}: {name} runs this file as it is: {does}."
    if filler:
        return f"{fine}: {filler} fills what is open, and {name} runs it: {does}."
    filled = all(one.id.startswith(_AUTO) for one in config.of_severity(Severity.OPEN))
    who = "the HF Trainer or Lightning" if filled else "your program"
    return f"{fine}{',' if warned else ''} once {who} fills what is open: {does}. {name} alone refuses this file."


def _program(config: DsConfig) -> str:
    of_deepspeed = config.dialect is Dialect.DEEPSPEED
    return f"DeepSpeed {version_text(config.zero.deepspeed)}" if of_deepspeed else str(config.dialect)


def check_json(config: DsConfig, version: str | None = None) -> dict[str, Any]:
    """Return the verdict, the findings and the keys as one object that JSON can hold; `version` is the program's."""
    return {
        "schema": 1,
        "file": config.source,
        "engine_version": version or version_text(config.zero.deepspeed),
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
        **({"program": str(config.dialect), "ignored": list(config.ignored)} if config.dialect is Dialect.RUNTIME else {}),
        "keys": [{"key": key.path, "effect": key.effect.value, "note": key.note} for key in config.keys],
    }


def verdict_text(config: DsConfig, terminal: Terminal = PLAIN, filler: str = "") -> str:
    """Return the verdict in lines: red where the program refuses the file, green where it runs it as it is."""
    return "\n".join(terminal.verdict(verdict(config, filler, builds=terminal.full), config.runs_filled))


def findings_text(config: DsConfig, terminal: Terminal = PLAIN, *, wide: bool = True) -> str:
    """Return the findings by severity, and the keys grouped by their effect on memory.

    Unless `wide`, only what the user has to mend or to know: neither what another program fills, nor the list of keys.
    """
    return "\n".join(_findings(config, terminal, wide=wide)).lstrip("\n")


def _findings(config: DsConfig, terminal: Terminal, *, wide: bool) -> list[str]:
    """Return the lines of :func:`findings_text`, an empty one before each group."""
    lines: list[str] = []
    for severity, title in _TITLES.items():
        if found := _shown(config, severity, wide=wide):
            title = title.format(program=config.dialect)
            title = title[:1].upper() + title[1:]
            lines += ["", terminal.bold(f"{title} ({len(found)})"), *terminal.items(_merged_texts(found))]
    if not wide:
        return lines
    if config.ignored:
        lines += ["", terminal.bold(f"Keys: without effect there ({len(config.ignored):,})")]
        lines += terminal.items(_grouped(config.ignored), mark="  ")
    for effect in MemoryEffect:
        paths = [key.path for key in config.keys if key.effect is effect and key.path not in config.ignored]
        if paths:
            more = [f"and {len(paths) - _MOST_KEYS:,} more"] if len(paths) > _MOST_KEYS else []
            shown = [*_grouped([_printable(path, _LONGEST_KEY) for path in paths[:_MOST_KEYS]]), *more]
            lines += ["", terminal.bold(f"Keys: {effect.value} ({len(paths):,})"), *terminal.items(shown, mark="  ")]
    return lines


def _shown(config: DsConfig, severity: Severity, *, wide: bool) -> Sequence[Finding]:
    """Return the findings of a severity; unless `wide`, without what another program fills."""
    found = config.of_severity(severity)
    if wide:
        return found
    filled = config.runs_filled and config.unresolved_auto
    return [one for one in found if not (filled and one.id.startswith(_AUTO)) and severity is not Severity.NOTE]


def _merged_texts(findings: Sequence[Finding]) -> list[str]:
    """Return one text for each finding; keys of which the same is said share one."""
    keys: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
    for one in findings:
        keys.setdefault((one.what, one.remedy), (one, []))[1].append(one.where)
    return [_printable(one.at_keys(where if len(where) == 1 else ["; ".join(_grouped(where))])) for one, where in keys.values()]


def _grouped(paths: Sequence[str]) -> list[str]:
    """Return the paths with those of one section together: ``"optimizer.params: lr, betas"``."""
    sections: dict[str, list[str]] = {}
    for path in paths:
        section, _, key = path.rpartition(".")
        sections.setdefault(section, []).append(key)
    return [
        f"{section}: {', '.join(keys)}"
        if section and len(keys) > 1
        else ", ".join(f"{section}.{key}".strip(".") for key in keys)
        for section, keys in sections.items()
    ]


def _printable(text: object, most: int = _LONGEST_LINE) -> str:
    shown = "".join(ch if ch.isprintable() else " " for ch in str(text))
    return shown if len(shown) <= most else shown[: most - 3] + "..."
