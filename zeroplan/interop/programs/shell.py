"""A training command in a shell script: who is started, on how many GPUs, with which flags. Nothing is run.

Lines that end in a backslash are joined, and variables that the script sets to plain text are put in. The command is the one
that starts a trainer: a launcher, ``python`` or a program's own command line, followed by flags.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.errors import BadInput

_ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|(\w+))")
#: Continued lines: a shell's backslash, and the caret of Windows.
_CONTINUED = re.compile(r"(?:\\|[ \t]\^)[ \t]*\r?\n")
#: An array over several lines; its words become the text of a variable. Quoted words and comments may hold parentheses. They
#: are taken in a lookahead, which is never tried again otherwise: before Python 3.11.5 ``(a|b)*+`` matches too little.
_ARRAY = re.compile(
    r"^[ \t]*((?:export|local|declare|readonly)[ \t]+(?:-a[ \t]+)?)?(\w+\+?)="
    r"\((?=((?:\"[^\"]*+\"|'[^']*+'|(?<=\s)#[^\n]*+|[^()\"'\s]++|\s)*))\3\)",
    re.MULTILINE,
)
_POSITIONAL = re.compile(r"\$\{?\d+\}?")
_QUOTED_ARRAY = re.compile(r'"\$\{(\w+)\[[@*]\]\}"')
_COMMENT = re.compile(r"(^|\s)#[^\n]*")
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
_ARITHMETIC = re.compile(r"\$\((?:\(|expr)\s*(\d{1,9}(?:\s*[-+*/]\s*\d{1,9}){0,8})\s*\)?\)")
_WRAPPERS = {"nohup", "srun", "time", "exec", "env", "sudo", "uv", "run", "bash", "-c", "poetry"}
#: Words that end a command; from the seventh on those of redirections.
_ENDS = ("|", "||", "&&", "&", ";", r"\&\&", ">", ">>", "2>&1", "2>", "&>")
_MOST_LINES = 5_000
#: Characters of all lines with variables put in.
_MOST_TEXT = 256 << 10
#: Lines of one text in quotes.
_MOST_QUOTED = 100


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


def _none(_program: str) -> bool:
    return False


def training_command(text: str, name: str, takes: Callable[[str], bool] = _none) -> Command:
    """Return the one command of a script that trains. `takes` says of a program whose flags do not show it that it does.

    Raises:
        BadInput: when there is none, or when several differ.
    """
    found = list(_commands(text, name, takes))
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


def _commands(text: str, name: str, takes: Callable[[str], bool]) -> Iterator[Command]:
    variables: dict[str, str] = {}
    lines = _ARRAY.sub(_as_text, _QUOTED_ARRAY.sub(r"${\1}", _CONTINUED.sub(" ", text))).splitlines()
    if len(lines) > _MOST_LINES:
        raise BadInput(f"holds more than {_MOST_LINES:,} lines", where=name, remedy="give the command alone")
    size = 0
    for line in _with_closed_quotes(lines):
        filled = _filled(line, variables)
        size += len(filled)
        if size > _MOST_TEXT:
            raise BadInput("is too long with its variables put in", where=name, remedy="give the command alone")
        words = _words(filled)
        own = dict(variables)
        while words and (said := _ASSIGNMENT.match(words[0])):
            _assign(said, own)
            words = words[1:]
        if not words:
            variables = own
            continue
        if words[0] in ("export", "local", "readonly"):
            for word in words[1:]:
                if said := _ASSIGNMENT.match(word):
                    _assign(said, variables)
            continue
        for part in _parts(words):
            command = _command(part, own, takes)
            if command is not None:
                yield command


def _with_closed_quotes(lines: list[str]) -> Iterator[str]:
    """Yield the lines, each joined with those after it up to the double quote that closes one that it opens."""
    at = 0
    while at < len(lines):
        end = at + 1
        if _open_quote(lines[at]):
            closing = (next_ for next_ in range(at + 1, min(at + _MOST_QUOTED, len(lines))) if _open_quote(lines[next_]))
            end = next(closing, at) + 1
        yield " ".join(lines[at:end])
        at = end


def _open_quote(line: str) -> bool:
    return not line.lstrip().startswith("#") and line.replace('\\"', "").count('"') % 2 == 1


def _assign(said: re.Match[str], variables: dict[str, str]) -> None:
    """Give a variable its value; after ``+=`` it stands behind the one before. The script is started without arguments, so
    ``$1`` gives none.
    """
    if not _POSITIONAL.fullmatch(said[3]):
        variables[said[1]] = variables.get(said[1], "") + said[3] if said[2] else said[3]


def _as_text(array: re.Match[str]) -> str:
    """Write an array as the assignment of its words; one behind ``+=`` is set off from those before."""
    words = " ".join(_COMMENT.sub(" ", array[3]).split()).replace('"', '\\"')
    return f'{array[2]}=" {words}"'


def _parts(words: list[str]) -> Iterator[list[str]]:
    """Yield the commands of one line: between ``&&`` and the like, and behind the ``--`` of a job scheduler's command."""
    part: list[str] = []
    for word in [*words, ";"]:
        if word in _ENDS[:6] or (word == "--" and part):
            if part:
                yield part
            part = []
        else:
            part.append(word.removesuffix(";") if word.endswith(";") and len(word) > 1 else word)


def _filled(line: str, variables: Mapping[str, str]) -> str:
    """Return the line with variables and whole numbers' arithmetic put in."""
    room = _MOST_TEXT

    def value(match: re.Match[str]) -> str:
        nonlocal room
        known = variables.get(match[1] or match[3])
        found = known if known is not None else match[2] if match[2] is not None else match[0]
        room -= len(found)
        return found if room > 0 else match[0]

    filled = line
    for _ in range(4):  # variables of variables
        after = _VARIABLE.sub(value, filled)
        if after == filled:
            break
        filled = after
    return _ARITHMETIC.sub(_computed, filled)


def _words(line: str) -> list[str]:
    """The words of one line without comments; none where the quotes do not close."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


def _computed(match: re.Match[str]) -> str:
    """The value of whole numbers with the four operators; the text as it is where a divisor is zero."""
    terms = re.findall(r"\d+|[-+*/]", match[1])
    total, sign, product = 0, 1, int(terms[0])
    for operator, term in zip(terms[1::2], terms[2::2], strict=True):
        number = int(term)
        if operator == "*":
            product *= number
        elif operator == "/":
            if number == 0:
                return match[0]
            product //= number
        else:
            total, sign, product = total + sign * product, 1 if operator == "+" else -1, number
    return str(total + sign * product)


def _command(words: list[str], environment: Mapping[str, str], takes: Callable[[str], bool]) -> Command | None:
    at = 0
    while at < len(words) and (words[at] in _WRAPPERS or _ASSIGNMENT.match(words[at])):
        at += 1
    rest = words[at:]
    if not rest:
        return None
    first = rest[0].rpartition("/")[2]
    if first == "accelerate" and rest[1:2] == ["launch"]:
        return _launched("accelerate", rest[2:], environment, takes)
    if first in ("deepspeed", "torchrun"):
        return _launched(first, rest[1:], environment, takes)
    if _PYTHON.match(rest[0]):
        modules = {
            "torch.distributed.launch": "torchrun",
            "torch.distributed.run": "torchrun",
            "accelerate.commands.launch": "accelerate",
        }
        if rest[1:2] == ["-m"] and len(rest) > 2 and rest[2] in modules:
            return _launched(modules[rest[2]], rest[3:], environment, takes)
        return _program("", {}, [word for word in rest[1:] if word != "-u"], environment, takes)
    if first in _OWN_COMMANDS and len(rest) > 1:
        return _program("", {}, [first, *rest[1:]], environment, takes)
    return None


def _launched(launcher: str, words: list[str], environment: Mapping[str, str], takes: Callable[[str], bool]) -> Command | None:
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
    return _program(launcher, machine, words[at:], environment, takes)


def _program(
    launcher: str,
    machine: Mapping[str, Any],
    words: list[str],
    environment: Mapping[str, str],
    takes: Callable[[str], bool],
) -> Command | None:
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
    recipe = any(word.lower().endswith(RECIPES) for word in (*files, *(str(flags.get(flag, "")) for flag in RECIPE_FLAGS)))
    if not (recipe or " " in program or _TRAINING_FLAGS & flags.keys() or takes(program)):
        return None
    gpus, nodes, processes = (_whole(machine.get(key)) for key in ("gpus", "nodes", "processes"))
    own = {key.removeprefix("--"): _value(str(value)) for key, value in machine.items() if key.startswith("--")}
    said_file = machine.get("config_file")
    config_file = said_file if isinstance(said_file, str) else None
    said = [str(machine[key]) for key in ("gpus", "processes", "nodes") if key in machine and _whole(machine[key]) is None]
    unclear = said[0] if said else ""
    return Command(program, launcher, flags, files, gpus, processes, nodes, config_file, own, dict(environment), unclear)


def _flags(words: list[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    flags: dict[str, Any] = {}
    files: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if _ends(word):
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
    return word in _ENDS or word.startswith(("2>", ">", "&>"))


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
