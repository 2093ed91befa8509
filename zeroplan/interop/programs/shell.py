"""A training command in a shell script: who is started, on how many GPUs, with which flags. Nothing is run.

The command is the one that starts a trainer: a launcher, ``python`` or a program's own command line, followed by flags. Those
of a loop are one, of which flags that differ are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.interop.programs.shell_run import ASSIGNMENT, WRAPPERS, Followed, Started, follow

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
#: Launchers, and which of their flags say the size of the machine.
_LAUNCHERS: dict[str, dict[str, str]] = {
    "deepspeed": {"num_gpus": "gpus", "num_nodes": "nodes"},
    "torchrun": {"nproc_per_node": "gpus", "nnodes": "nodes"},
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
#: Flags that name a file of arguments, and the ends of such files' names.
RECIPE_FLAGS = ("config", "job.config_file")
RECIPES = (".yaml", ".yml", ".json", ".toml")
#: Flags of which a script that trains has at least one.
_TRAINING_FLAGS = frozenset(
    (
        *("per_device_train_batch_size", "per_gpu_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_attention_heads"),  # Megatron-LM's
        *("gradient_checkpointing", "finetuning_type", "max_train_steps", "train_type", "tuner_type", "lora_r", "lora_rank"),
        "do_train",
    )
)
#: Scripts that merge, convert or evaluate what another one has trained.
_OTHER_DEED = re.compile(r"(^|[/_.])(merge|convert|export|eval|evaluate|infer|inference|predict)(_\w+)?(\.py)?$")
#: Words that end a command where quotes or backslashes keep them from the shell.
_ENDS = ("|", "||", "&&", "&", ";")
_MOST_LINES = 5_000
#: Variables by which programs size their machine.
_OF_MACHINES = ("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES")
#: A word that is a variable as a whole, and may be any arguments.
_OPEN = re.compile(r"\$(\w+|\{\w+(\[[@*]\])?\}|@)")


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
        launch_flags: the launcher's own flags, by name with underscores.
        environment: variables set on the command line or exported before it.
        open_machine: what the launcher says of GPUs or nodes that is no number, such as ``$1``.
        folder: in which it runs: a path, one from where the script is started, or None where no text tells.
        why: of variables that no text tells, what decides each.
        assumed: what reading the script takes for granted.
        unread: words and sourced files that may hold further arguments, with what each is.
    """

    program: str
    launcher: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    gpus: int | None = None
    processes: int | None = None
    nodes: int | None = None
    config_file: str | None = None
    launch_flags: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    open_machine: str = ""
    folder: str | None = ""
    why: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()


def training_command(
    text: str, name: str, find: Callable[[str], Path | None], takes: Callable[[Command], bool] = lambda _: False
) -> Command:
    """Return the one command of a script that trains.

    Args:
        name: its path.
        find: where a file is that the script sources or starts; None where it is not there.
        takes: whether a program trains whose flags do not show it.

    Raises:
        BadInput: when there is none, or when several differ.
    """
    if text.count("\n") >= _MOST_LINES:
        raise BadInput(f"holds more than {_MOST_LINES:,} lines", where=name, remedy="give the command alone")
    found: list[tuple[int, Command]] = []
    for bare in (True, False):  # a script that ends without arguments is followed with any
        found = found or list(_commands(follow(text, name, find, arguments=() if bare else None), takes))
    if not found:
        raise BadInput(
            "holds no command whose flags show that it trains",
            where=name,
            remedy="give the line with the launcher and its --flags, or the file that it names; "
            f"zeroplan capture -- bash {name} runs it",
        )
    trains = [(line, one) for line, one in found if not _OTHER_DEED.search(one.program)]
    found = trains or found
    kinds: dict[tuple[Any, ...], list[Command]] = {}
    for line, one in found:
        kinds.setdefault((line, one.program, one.launcher, one.files, one.config_file), []).append(one)
    commands = [_joined(same, line) for (line, *_), same in kinds.items()]
    if any(not _same(one, commands[0]) for one in commands[1:]):
        raise BadInput(
            f"holds {len(commands)} commands that train ({', '.join(one.program[:40] for one in commands[:4])})",
            where=name,
            remedy="leave one of them in the file",
        )
    return commands[0]


def _commands(followed: Followed, takes: Callable[[Command], bool]) -> Iterator[tuple[int, Command]]:
    sourced = tuple((one, "is not there to be read: what it sets is unknown") for one in followed.unread)
    for started in followed.commands:
        for part in _parts(started.words):
            command = _command(part, started)
            if command is not None and (_shows_training(command) or takes(command)):
                yield started.line, replace(command, assumed=followed.noted, unread=(*sourced, *command.unread))


def _same(one: Command, other: Command) -> bool:
    """Whether two commands start the same run on the same machine."""
    plain = [replace(each, environment={}, why={}) for each in (one, other)]
    return plain[0] == plain[1] and _machine(one) == _machine(other)


def _joined(same: list[Command], line: int) -> Command:
    """Return the command that a loop or a function starts several times: flags that differ are unknown."""
    first, *others = same
    differ = [name for name in first.flags if any(one.flags.get(name) != first.flags[name] for one in others)]
    differ += [name for one in others for name in one.flags if name not in first.flags]
    says = f"line {line}: it differs between the {len(same)} runs that the script starts"
    if any(_machine(one) != _machine(first) for one in others):
        environment = {name: value for name, value in first.environment.items() if name not in _OF_MACHINES}
        open_machine = f"another number in each of {len(same)} runs"
        first = replace(
            first, gpus=None, processes=None, nodes=None, launch_flags={}, environment=environment, open_machine=open_machine
        )
    if not differ:
        return first
    flags = {**first.flags, **{name: f"${name}" for name in differ}}
    return replace(first, flags=flags, why={**first.why, **dict.fromkeys(differ, says)})


def _machine(one: Command) -> tuple[Any, ...]:
    """What a command says of its machine."""
    return one.gpus, one.processes, one.nodes, one.launch_flags, [one.environment.get(name) for name in _OF_MACHINES]


def _parts(words: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the commands of one line: behind the ``--`` of a job scheduler's command, and between words that end one."""
    part: list[str] = []
    for word in (*words, ";"):
        if word in _ENDS or (word == "--" and part):
            if part:
                yield part
            part = []
        else:
            part.append(word)


def _starts(word: str) -> bool:
    """Whether a word is a launcher, Python, or a program's own command."""
    return _PYTHON.match(word) is not None or word.rpartition("/")[2] in {*_LAUNCHERS, *_OWN_COMMANDS}


def _command(words: list[str], started: Started) -> Command | None:
    at = 0
    while at < len(words) and ASSIGNMENT.fullmatch(words[at]):
        at += 1
    if words[at : at + 1] and words[at] in WRAPPERS:  # its own options stand before what it starts
        at = next((at for at, word in enumerate(words) if _starts(word)), len(words))
    rest = words[at:]
    if not rest:
        return None
    first = rest[0].rpartition("/")[2]
    if first == "accelerate" and rest[1:2] == ["launch"]:
        return _launched("accelerate", rest[2:], started)
    if first in ("deepspeed", "torchrun"):
        return _launched(first, rest[1:], started)
    if _PYTHON.match(rest[0]):
        modules = {
            "torch.distributed.launch": "torchrun",
            "torch.distributed.run": "torchrun",
            "accelerate.commands.launch": "accelerate",
        }
        if rest[1:2] == ["-m"] and len(rest) > 2 and rest[2] in modules:
            return _launched(modules[rest[2]], rest[3:], started)
        return _program("", {}, [word for word in rest[1:] if word != "-u"], started)
    if first in _OWN_COMMANDS and len(rest) > 1:
        return _program("", {}, [first, *rest[1:]], started)
    return None


def _launched(launcher: str, words: list[str], started: Started) -> Command | None:
    """Return the program that a launcher starts; the launcher's own flags come before its name."""
    machine: dict[str, Any] = {}
    known = _LAUNCHERS[launcher]
    at = 0
    while at < len(words) and words[at].startswith(("-", "$")):
        if words[at].startswith("$"):  # its arguments are a variable that the script does not set
            machine["gpus"] = words[at]
            at += 1
            continue
        name, has_value, value = words[at].lstrip("-").partition("=")
        name = name.replace("-", "_")
        at += 1
        if name in ("m", "module"):
            break
        if not has_value and at < len(words) and not words[at].startswith("-") and not words[at].endswith((".py", ".sh")):
            value, at = words[at], at + 1
        machine[known.get(name) or f"--{name}"] = value if value or has_value else True
    return _program(launcher, machine, words[at:], started)


def _program(launcher: str, machine: Mapping[str, Any], words: list[str], started: Started) -> Command | None:
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
    unclear = [str(machine[key]) for key in ("gpus", "processes", "nodes") if key in machine and _whole(machine[key]) is None]
    opened = [word for word in files if _OPEN.fullmatch(word)]
    said_file = machine.get("config_file")
    return Command(
        program=program,
        launcher=launcher,
        flags=flags,
        files=tuple(word for word in files if word not in opened),
        gpus=_whole(machine.get("gpus")),
        processes=_whole(machine.get("processes")),
        nodes=_whole(machine.get("nodes")),
        config_file=said_file if isinstance(said_file, str) else None,
        launch_flags={key.removeprefix("--"): _value(str(value)) for key, value in machine.items() if key.startswith("--")},
        environment=started.variables,
        open_machine=unclear[0] if unclear else "",
        folder=started.folder,
        why=started.why,
        unread=tuple((word, started.why.get(word.strip("${}@[]*"), "may hold further arguments")) for word in opened),
    )


def _shows_training(command: Command) -> bool:
    """Whether a command's recipe, verb or flags show that it trains."""
    words = (*command.files, *(str(command.flags.get(flag, "")) for flag in RECIPE_FLAGS))
    recipe = any(word.lower().endswith(RECIPES) for word in words)
    return recipe or " " in command.program or bool(_TRAINING_FLAGS & command.flags.keys())


def _flags(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return flags by name, and the words that are none."""
    flags: dict[str, Any] = {}
    files: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
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
        while at < len(words) and not words[at].startswith("--"):
            after = files if values and _OPEN.fullmatch(words[at]) else values  # it may be further arguments
            after.append(words[at])
            at += 1
        flags[name] = True if not values else _value(values[0]) if len(values) == 1 else [_value(one) for one in values]
    return flags, files


def _value(text: str) -> Any:
    """Read a flag's value: a number, true or false, null, or text."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null"):
        return None
    if len(text) <= 64 and _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return text


def _whole(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isdigit() and len(text) < 7 else None
