"""Holds the table of DeepSpeed's versions against their own source: keys that a section knows, and defaults that moved.

    python -m benchmarks.deepspeed_versions FOLDER

FOLDER has the source of each version in a folder whose name holds the version (``v0.14.4``, ``deepspeed-0.19.6``): a checkout,
or what ``pip download deepspeed==0.14.4 --no-deps --no-binary :all:`` brings, unpacked. The sections that DeepSpeed declares
as classes are read from their syntax trees, without running them; of those that it did not declare yet, what constants say.
Prints each key whose presence or default in the source is not what ``zeroplan.ds_config.versions`` says of that version, and
exits with 1 where there is one.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeroplan.core.versions import Version, parse_version, version_text
from zeroplan.ds_config.coercion import ValueKind
from zeroplan.ds_config.sections import SECTIONS
from zeroplan.ds_config.versions import came_later, older_defaults

_ZERO = "zero_optimization"
#: The class of each section, by the file within deepspeed/runtime/ that declares it.
CLASSES = {
    "zero/config.py": {"DeepSpeedZeroConfig": _ZERO},
    "zero/offload_config.py": {
        "DeepSpeedZeroOffloadParamConfig": f"{_ZERO}.offload_param",
        "DeepSpeedZeroOffloadOptimizerConfig": f"{_ZERO}.offload_optimizer",
    },
    "zenflow/zenflow_config.py": {"ZenFlowConfig": f"{_ZERO}.zenflow"},
    "precision_config.py": {"DeepSpeedBF16Config": "bf16", "DeepSpeedFP16Config": "fp16"},
}
#: Constants of runtime/constants.py that state a default, by the key.
CONSTANTS = {
    "GRADIENT_CLIPPING_DEFAULT": "gradient_clipping",
    "BFLOAT16_IMMEDIATE_GRAD_UPDATE_DEFAULT": "bf16.immediate_grad_update",
}
_VERSION = re.compile(r"\d+\.\d+\.\d+")
#: A default that is made by a call, or named: no value to compare.
UNREAD = object()


def main(arguments: list[str]) -> int:
    """Compare every version below the folder; returns 1 where one differs or there is none."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    found = {parse_version(match[0]): path for path in sorted(folder.iterdir()) if (match := _VERSION.search(path.name))}
    if not found:
        print(f"{folder} holds no folder that is named by a version", file=sys.stderr)
        return 1
    wrong = 0
    for version, path in sorted(found.items()):
        declared = read_source(path / "deepspeed" / "runtime")
        differences = list(compared(version, declared))
        wrong += len(differences)
        keys = sum(len(keys) for keys in declared.values())
        print(f"{version_text(version)}: {keys} keys of {len(declared)} sections, {len(differences)} differences")
        for line in differences:
            print(f"  {line}")
    return int(bool(wrong))


def read_source(runtime: Path) -> dict[str, dict[str, Any]]:
    """Return each section's keys with their defaults, :data:`UNREAD` for those that are no literals."""
    found: dict[str, dict[str, Any]] = {}
    for name, classes in CLASSES.items():
        path = runtime / name
        if not path.exists():
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                found[classes[node.name]] = dict(_fields(node))
    constants = runtime / "constants.py"
    for node in ast.parse(constants.read_text(encoding="utf-8")).body if constants.exists() else ():
        name = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
        if isinstance(node, ast.Assign) and name in CONSTANTS:
            section, _, key = CONSTANTS[name].rpartition(".")
            if section in found:
                continue  # left over: the class decides
            found.setdefault(f"{section} of constants.py".strip(), {})[key] = _literal(node.value)
    return found


def compared(version: Version, declared: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each key of the declared sections whose presence or default the table has otherwise."""
    older = older_defaults(version)
    for place, keys in declared.items():
        section, whole = place.partition("of constants.py")[0].strip(), place in SECTIONS
        for key in SECTIONS[section].keys.values():
            path = f"{section}.{key.name}".strip(".")
            later = came_later(path, version)
            if key.name not in keys:
                if whole and later is None:
                    yield f"{path} is not there, the table knows no version that brought it"
                continue
            if later is not None:
                yield f"{path} is there, the table says from {version_text(later)} on"
            if key.kind is ValueKind.SECTION or path in SECTIONS:
                continue
            said, there = _plain(older.get(path, key.default)), keys[key.name]
            if there is not UNREAD and said is not None and _plain(there) != said:
                yield f"{path} is {there!r}, the table says {said!r}"


def _fields(declared: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for node in declared.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        value = node.value
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "Field":
            given = [word.value for word in value.keywords if word.arg == "default"]
            value = value.args[0] if value.args else given[0] if given else None
        yield node.target.id, UNREAD if value is None else _literal(value)


def _literal(value: ast.expr) -> Any:
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "pp_int":  # a number with its own way of printing
        value = value.args[0]
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id.endswith("Enum"):
        return value.attr
    try:
        return ast.literal_eval(value)
    except ValueError:
        return UNREAD


def _plain(value: Any) -> Any:
    plain = getattr(value, "value", value)
    return list(plain) if isinstance(plain, tuple) else plain


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
