"""What a person types to start training, as the one process that is captured: launchers' ranks become one.

Read here are the launchers' own words (torchrun, deepspeed, accelerate launch, python); the script's arguments stay as they
are. A shell script's command is found by :mod:`zeroplan.interop.programs.shell`, which runs nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zeroplan.core.errors import BadInput

_PYTHON = re.compile(r"^(.*/)?python[\d.]*$")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
#: Words that start another command and change nothing of it that a plan reads.
_WRAPPERS = frozenset(("nohup", "time", "exec", "env", "sudo", "numactl", "nice", "stdbuf"))
_RUNNERS = {("uv", "run"), ("poetry", "run"), ("pdm", "run"), ("pixi", "run")}
#: Switches of python that take no value.
_PYTHON_SWITCHES = frozenset(("-u", "-O", "-OO", "-B", "-E", "-I", "-s", "-S"))
#: Switches of launchers, which take no value.
_SWITCHES: Mapping[str, frozenset[str]] = {
    "torchrun": frozenset(("standalone", "no_python", "run_path", "use_env")),
    "deepspeed": frozenset(("no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid",
                            "bind_cores_to_rank", "enable_each_rank_log")),
    "accelerate": frozenset(("cpu", "multi_gpu", "tpu", "ipex", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_xpu",
                             "quiet", "no_python", "debug", "tpu_cluster", "no_tpu_cluster", "dynamo_use_fullgraph",
                             "dynamo_use_dynamic", "use_parallelism_config", "enable_cpu_affinity", "same_network")),
}  # fmt: skip
_LAUNCHERS = frozenset(_SWITCHES)
#: Launchers' flags that say how many processes there are: a node's, all, and nodes.
_LOCAL = {"torchrun": ("nproc_per_node",), "deepspeed": ("num_gpus",), "accelerate": ()}
_NODES = {"torchrun": ("nnodes",), "deepspeed": ("num_nodes",), "accelerate": ("num_machines",)}
#: Short names of the same flags.
_SHORT = {"m": "module", "num_gpus": "num_gpus"}
#: Of srun: short names of options, and those that take no value.
_SRUN_SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus"}
_SRUN_SWITCHES = frozenset(("exclusive", "unbuffered", "u", "label", "l", "pty", "overlap", "no-kill", "k", "verbose", "v",
                            "quiet", "Q", "kill-on-bad-exit", "mpi"))  # fmt: skip
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Start:
    """One process of the command.

    Attributes:
        target: a script's path, or a module's name.
        module: whether the target is a module (``-m``).
        arguments: the script's own words.
        launcher: ``torchrun``, ``deepspeed``, ``accelerate``, ``srun``, or empty for plain python.
        local_ranks: processes on a node; None where the launcher leaves it to the GPUs that it finds.
        nodes: nodes; None where the command leaves it open.
        environment: variables that the command sets.
        launch_words: what stands behind the launcher's name.
        folder: in which it runs; empty for this one.
    """

    target: str
    module: bool = False
    arguments: tuple[str, ...] = ()
    launcher: str = ""
    local_ranks: int | None = None
    nodes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    launch_words: tuple[str, ...] = ()
    folder: str = ""

    def given(self, local_rank: int) -> tuple[str, ...]:
        """The words that the script gets: DeepSpeed's launcher puts the process's number before them (launcher/launch.py)."""
        before = self.launch_words[: len(self.launch_words) - len(self.arguments)]
        tells = self.launcher == "deepspeed" and not {"--no_local_rank", "--no-local-rank"} & set(before)
        return (f"--local_rank={local_rank}", *self.arguments) if tells else self.arguments


def start_of(words: Sequence[str]) -> Start:
    """Return the process that a command starts.

    Raises:
        BadInput: a command that starts no Python program, or several that differ.
    """
    environment: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest[0]
        if _ASSIGNMENT.match(word):
            name, _, value = word.partition("=")
            environment[name] = value
        elif tuple(rest[:2]) in _RUNNERS:
            rest.pop(0)
        elif word in _WRAPPERS:
            rest = _without_switches(rest)
        elif word == "srun":
            return _of_srun(rest[1:], environment)
        else:
            break
        rest.pop(0)
    if not rest:
        raise BadInput(
            "no command to run", where="capture", remedy="give it behind --, as in: zeroplan capture -- python train.py"
        )
    return _of_program(rest, environment)


def _without_switches(rest: list[str]) -> list[str]:
    """Drop a wrapper's own switches that hold their value; the wrapper itself stays first."""
    at = 1
    while at < len(rest) and rest[at].startswith("-"):
        at += 1
    return [rest[0], *rest[at:]]


def _of_srun(rest: list[str], environment: Mapping[str, str]) -> Start:
    """What Slurm starts on each of its tasks, of which one is the process, unless they start a launcher's."""
    flags: dict[str, str] = {}
    while rest and rest[0].startswith("-"):
        name, joined, value = rest.pop(0).lstrip("-").partition("=")
        if len(name) > 1 and name[0] in _SRUN_SHORT and name[1:].isdigit():
            name, joined, value = name[0], "=", name[1:]
        if not joined and name not in _SRUN_SWITCHES and rest:
            value = rest.pop(0)
        flags[_SRUN_SHORT.get(name, name).replace("-", "_")] = value
    inner = start_of(rest)
    inner = replace(inner, environment={**environment, **inner.environment})
    if inner.launcher:
        return inner
    nodes = _count("srun", flags, ("nodes",)) or 1
    local, total = _count("srun", flags, ("ntasks_per_node",)), _count("srun", flags, ("ntasks",))
    if local is None and total is not None:
        local = max(1, total // nodes)
    return replace(inner, launcher="srun", local_ranks=local, nodes=nodes)


def _of_program(rest: list[str], environment: Mapping[str, str]) -> Start:
    program = Path(rest[0]).name
    if _PYTHON.match(rest[0]):
        return _of_python(rest, environment)
    if program == "torchrun":
        return _of_launcher("torchrun", rest[1:], environment)
    if program == "deepspeed":
        return _of_launcher("deepspeed", rest[1:], environment)
    if program == "accelerate" and rest[1:2] == ["launch"]:
        return _of_launcher("accelerate", rest[2:], environment)
    if program in ("bash", "sh", "zsh", "source", "."):
        return _of_shell(rest[1:], environment)
    if rest[0].endswith(".sh"):
        return _of_shell(rest, environment)
    if rest[0].endswith((".py", ".ipynb")):
        return Start(rest[0], arguments=tuple(rest[1:]), environment=environment)
    return _of_console(rest, environment)


def _of_console(rest: list[str], environment: Mapping[str, str]) -> Start:
    """A program on the path that is a Python script, such as ``trl`` or ``litgpt``."""
    found = shutil.which(rest[0])
    if found is not None:
        first = Path(found).read_bytes()[:200].split(b"\n", 1)[0]
        if first.startswith(b"#!") and b"python" in first:
            return Start(found, arguments=tuple(rest[1:]), environment=environment)
    raise BadInput(
        f"{rest[0][:80]!r} starts no Python program that can be found",
        where="capture",
        remedy="give python, torchrun, deepspeed, accelerate launch, bash run.sh, or a command of an installed package",
    )


def _of_python(rest: list[str], environment: Mapping[str, str]) -> Start:
    at = 1
    while at < len(rest) and (rest[at] in _PYTHON_SWITCHES or rest[at] in ("-X", "-W")):
        at += 2 if rest[at] in ("-X", "-W") else 1
    if at >= len(rest):
        raise BadInput("python without a script", where="capture", remedy="give python train.py")
    if rest[at] == "-m":
        if at + 1 >= len(rest):
            raise BadInput("-m without a module", where="capture", remedy="give python -m package.train")
        name, arguments = rest[at + 1], rest[at + 2 :]
        if name in ("torch.distributed.run", "torch.distributed.launch"):
            return _of_launcher("torchrun", arguments, environment)
        if name == "accelerate.commands.launch" or (name == "accelerate" and arguments[:1] == ["launch"]):
            return _of_launcher("accelerate", arguments[arguments[:1] == ["launch"] :], environment)
        if name in ("deepspeed.launcher.runner", "deepspeed"):
            return _of_launcher("deepspeed", arguments, environment)
        return Start(name, module=True, arguments=tuple(arguments), environment=environment)
    if rest[at] == "-c":
        raise BadInput("python -c has no file to name lines of", where="capture", remedy="write the code into a script")
    return Start(rest[at], arguments=tuple(rest[at + 1 :]), environment=environment)


def _of_launcher(launcher: str, rest: list[str], environment: Mapping[str, str]) -> Start:
    flags: dict[str, str] = {}
    words, at = tuple(rest), 0
    while at < len(rest) and rest[at].startswith("-"):
        name, joined, value = rest[at].lstrip("-").partition("=")
        name = _SHORT.get(name, name).replace("-", "_")
        at += 1
        if name == "module" and not joined:
            flags[name] = "true"
            continue
        if not joined and name not in _SWITCHES[launcher] and at < len(rest):
            value = rest[at]
            at += 1
        flags[name] = value or "true"
    if at >= len(rest):
        raise BadInput(f"{launcher} without a script", where="capture", remedy=f"give {launcher} … train.py")
    nodes = _count(launcher, flags, _NODES[launcher])
    local = _count(launcher, flags, _LOCAL[launcher])
    if launcher == "deepspeed" and local is None and "include" in flags:
        local = _included(flags["include"])
    if launcher == "accelerate":
        flags = _accelerate_file(flags) | flags
        nodes = nodes or _count(launcher, flags, ("num_machines",))
        total = _count(launcher, flags, ("num_processes",))
        local = None if total is None else max(1, total // (nodes or 1))
    if launcher == "torchrun" and local is None and flags.get("nproc_per_node") is None:
        local = 1
    return Start(rest[at], flags.get("module") == "true", tuple(rest[at + 1 :]), launcher, local, nodes, environment, words)


def _count(launcher: str, flags: Mapping[str, str], names: Sequence[str]) -> int | None:
    """The number that a launcher's flag says; the most of a range as torchrun takes it; None where it leaves it open.

    Raises:
        BadInput: no number.
    """
    for name in names:
        said = flags.get(name)
        if said is None or said in ("gpu", "auto", "-1"):
            continue
        number = said.rpartition(":")[2]
        if not number.isdigit() or not 1 <= int(number) <= _MOST_RANKS:
            raise BadInput(f"{said[:40]!r} is no number of processes", where=f"{launcher} --{name}", remedy="give a number")
        return int(number)
    return None


def _included(text: str) -> int:
    """GPUs of the first node of DeepSpeed's ``--include host:0,1,2``."""
    first = text.split("@")[0].rpartition(":")[2]
    return len([one for one in first.split(",") if one])


def _accelerate_file(flags: Mapping[str, str]) -> dict[str, str]:
    """What accelerate's config file says, the values as text; empty without one.

    Raises:
        BadInput: a file that cannot be read.
    """
    name = flags.get("config_file")
    if name is None:
        return {}
    from zeroplan.core.plumbing.documents import read_document

    held = read_document(name)
    return {str(key): str(value) for key, value in held.items() if not isinstance(value, (dict, list)) and value is not None}


def _of_shell(rest: list[str], environment: Mapping[str, str]) -> Start:
    """The one command of a shell script, or of ``bash -c``, that starts a Python program.

    Raises:
        BadInput: a script that starts none, or several that differ.
    """
    from zeroplan.interop.programs.shell_run import follow

    if rest[:1] == ["-c"]:
        text, name, given = (rest[1] if len(rest) > 1 else ""), "bash -c", rest[3:]
    else:
        at = next((at for at, word in enumerate(rest) if not word.startswith("-")), None)
        if at is None:
            raise BadInput("bash without a script", where="capture", remedy="give bash run.sh")
        name = path = rest[at]
        given = rest[at + 1 :]
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise BadInput(f"cannot be read: {error.strerror}", where=path, remedy="give a script that is there") from None

    def there(path: str) -> Path | None:
        found = Path(name).parent / path
        return found if found.is_file() else None

    starts: list[Start] = []
    set_here = {**os.environ, **environment, "PWD": os.getcwd()}
    for started in follow(text, name, there, arguments=tuple(given), environment=set_here).commands:
        words = list(started.words)
        if not _starts_python(words):
            continue
        inner = start_of(words)
        changed = {name: value for name, value in started.variables.items() if set_here.get(name) != value}
        folder = str(Path(started.folder or "", inner.folder))
        if started.folder is None or not Path(folder).is_dir():
            what = "runs it in a folder that no text tells" if started.folder is None else f"there is no folder {folder[:80]}"
            raise BadInput(what, where=f"{name}, line {started.line}", remedy="go there, and give the one command itself")
        one = replace(inner, environment={**environment, **changed, **inner.environment}, folder=folder)
        if all(one.target != other.target or one.arguments != other.arguments for other in starts):
            starts.append(one)
    if len(starts) != 1:
        named = ", ".join(one.target[:40] for one in starts[:4])
        raise BadInput(
            f"starts {len(starts)} Python programs ({named})" if starts else "starts no Python program",
            where=name,
            remedy="give the one command itself",
        )
    return starts[0]


def _starts_python(words: list[str]) -> bool:
    """Whether a command starts a Python program that could train."""
    if "srun" in words:  # whose switches may have values
        words = words[next((at for at, word in enumerate(words) if _PYTHON.match(word) or word in _LAUNCHERS), len(words)) :]
    rest = [word for word in words if word not in _WRAPPERS and not _ASSIGNMENT.match(word)]
    first = Path(rest[0]).name if rest else ""
    python = (bool(_PYTHON.match(first)) and rest[1:2] not in (["-c"], ["-m"])) or rest[1:3] == ["-m", "torch.distributed.run"]
    return python or first in ("torchrun", "deepspeed") or (first == "accelerate" and rest[1:2] == ["launch"])


def as_text(words: Sequence[str]) -> str:
    """Return a command as one line of a shell."""
    return " ".join(shlex.quote(word) for word in words)
