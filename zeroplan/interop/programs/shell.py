"""A training command in a shell script: who is started, on how many GPUs, with which flags. Nothing is run.

Lines that end in a backslash are joined, and variables that the script sets to plain text are put in. The command is the one
that starts a trainer: a launcher, ``python`` or a program's own command line, followed by flags.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.errors import BadInput

_ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
#: Launchers, and what their flags say of the machine; a value of None is a switch without an argument.
_LAUNCHERS: dict[str, dict[str, str]] = {
    "deepspeed": {"num_gpus": "gpus", "num_nodes": "nodes", "include": "", "hostfile": "", "master_port": "", "exclude": ""},
    "torchrun": {"nproc_per_node": "gpus", "nnodes": "nodes", "node_rank": "", "master_addr": "", "master_port": ""},
    "accelerate": {"num_processes": "processes", "num_machines": "nodes", "config_file": "config_file"},
}
_PYTHON = re.compile(r"^(.*/)?python[\d.]*$")
#: Command lines of programs that train, as their first word and the verbs that start training.
_OWN_COMMANDS = {
    "trl": {"sft", "dpo", "grpo", "kto", "reward", "rloo"},
    "swift": {"sft", "pt", "rlhf"},
    "megatron": {"sft", "pt", "rlhf"},
    "llamafactory-cli": {"train"},
    "axolotl": {"train"},
    "tune": {"run"},
}
_WRAPPERS = {"nohup", "srun", "time", "exec", "env", "sudo", "uv", "run", "bash", "-c", "poetry"}
_MOST_LINES = 5_000


@dataclass(frozen=True, slots=True)
class Command:
    """One command line that trains.

    Attributes:
        program: what is started, such as ``train.py`` or ``swift sft``.
        launcher: ``deepspeed``, ``torchrun``, ``accelerate`` or empty.
        flags: by name without dashes, with underscores; values as YAML would read them, switches true.
        files: positional files of the program, such as a recipe.
        gpus: a node, where the launcher says.
        processes: on all nodes, where the launcher says.
        nodes: nodes, where the launcher says.
        config_file: what ``accelerate launch --config_file`` names.
        environment: variables set on the command line or exported before it.
    """

    program: str
    launcher: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    gpus: int | None = None
    processes: int | None = None
    nodes: int | None = None
    config_file: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def training_command(text: str, name: str) -> Command:
    """The one command of a script that trains.

    Raises:
        BadInput: when there is none, or when several differ.
    """
    found = list(_commands(text, name))
    if not found:
        raise BadInput(
            "holds no command that trains",
            where=name,
            remedy="give the line with the launcher and its --flags, or the file that it names",
        )
    if len(found) > 1 and any(one != found[0] for one in found[1:]):
        raise BadInput(
            f"holds {len(found)} commands that train ({', '.join(one.program[:40] for one in found[:4])})",
            where=name,
            remedy="leave one of them in the file",
        )
    return found[0]


def _commands(text: str, name: str) -> Iterator[Command]:
    variables: dict[str, str] = {}
    lines = re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines()
    if len(lines) > _MOST_LINES:
        raise BadInput(f"holds more than {_MOST_LINES:,} lines", where=name, remedy="give the command alone")
    for line in lines:
        words = _words(line, variables)
        own = dict(variables)
        while words and (said := _ASSIGNMENT.match(words[0])):
            own[said[1]] = said[2]
            words = words[1:]
        if not words:
            variables = own
            continue
        if words[0] in ("export", "local", "readonly"):
            for word in words[1:]:
                if said := _ASSIGNMENT.match(word):
                    variables[said[1]] = said[2]
            continue
        command = _command(words, own)
        if command is not None:
            yield command


def _words(line: str, variables: Mapping[str, str]) -> list[str]:
    """The words of one line, with variables put in and comments left out; none where the quotes do not close."""

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3])
        return known if known is not None else match[2] if match[2] is not None else match[0]

    filled = line
    for _ in range(4):  # variables of variables
        after = _VARIABLE.sub(value, filled)
        if after == filled or len(after) > 1 << 16:
            break
        filled = after
    try:
        return shlex.split(filled, comments=True)
    except ValueError:
        return []


def _command(words: list[str], environment: Mapping[str, str]) -> Command | None:
    at = 0
    while at < len(words) and (words[at] in _WRAPPERS or _ASSIGNMENT.match(words[at])):
        at += 1
    rest = words[at:]
    if not rest:
        return None
    first = rest[0].rpartition("/")[2]
    if first == "accelerate" and rest[1:2] == ["launch"]:
        return _launched("accelerate", rest[2:], environment)
    if first in ("deepspeed", "torchrun"):
        return _launched(first, rest[1:], environment)
    if _PYTHON.match(rest[0]):
        modules = {
            "torch.distributed.launch": "torchrun",
            "torch.distributed.run": "torchrun",
            "accelerate.commands.launch": "accelerate",
        }
        if rest[1:2] == ["-m"] and len(rest) > 2 and rest[2] in modules:
            return _launched(modules[rest[2]], rest[3:], environment)
        return _program("", {}, [word for word in rest[1:] if word != "-u"], environment)
    if first in _OWN_COMMANDS and len(rest) > 1:
        return _program("", {}, [first, *rest[1:]], environment)
    return None


def _launched(launcher: str, words: list[str], environment: Mapping[str, str]) -> Command | None:
    """A launcher's own flags come before the program's name."""
    machine: dict[str, str] = {}
    known = _LAUNCHERS[launcher]
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, has_value, value = words[at].lstrip("-").partition("=")
        name = name.replace("-", "_")
        at += 1
        if name in ("m", "module"):
            break
        if not has_value and at < len(words) and not words[at].startswith("-") and not words[at].endswith((".py", ".sh")):
            value, at = words[at], at + 1
        if known.get(name):
            machine[known[name]] = value
    return _program(launcher, machine, words[at:], environment)


def _program(launcher: str, machine: Mapping[str, str], words: list[str], environment: Mapping[str, str]) -> Command | None:
    if words[:1] == ["-m"]:
        words = words[1:]
    if not words:
        return None
    program, rest = words[0], words[1:]
    short = program.rpartition("/")[2]
    if short in _OWN_COMMANDS and rest and rest[0] in _OWN_COMMANDS[short]:
        program, rest = f"{short} {rest[0]}", rest[1:]
    elif short in _OWN_COMMANDS:
        return None
    flags, files = _flags(rest)
    if not flags and not files:
        return None
    gpus, nodes, processes = (_whole(machine.get(key)) for key in ("gpus", "nodes", "processes"))
    return Command(program, launcher, flags, files, gpus, processes, nodes, machine.get("config_file"), dict(environment))


def _flags(words: list[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    flags: dict[str, Any] = {}
    files: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word in ("|", "||", "&&", "&", ";", ">", ">>", "2>&1", "2>", "&>"):
            break
        if not word.startswith("--"):
            if "=" in word and not flags and word.partition("=")[0].replace(".", "").isidentifier():
                key, _, value = word.partition("=")
                flags[key] = _value(value)
            else:
                files.append(word)
            continue
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if has_value:
            flags[name] = _value(value)
            continue
        values: list[str] = []
        while at < len(words) and not words[at].startswith("--") and not _ends(words[at]):
            values.append(words[at])
            at += 1
        flags[name] = True if not values else _value(values[0]) if len(values) == 1 else [_value(one) for one in values]
    return flags, tuple(files)


def _ends(word: str) -> bool:
    return word in ("|", "||", "&&", "&", ";", ">", ">>", "2>&1", "2>", "&>") or word.startswith(("2>", ">", "&>"))


def _value(text: str) -> Any:
    """A flag's value: a number, true or false, null, or text."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null"):
        return None
    if len(text) <= 64 and _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return text


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 7 else None
