"""The command that starts a program on nodes × GPUs, with the files and the variables that its launcher needs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeroplan.core.errors import BadInput
from zeroplan.interop.forms.configuration import WRITTEN

LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "slurm")
#: Where ranks of several nodes meet, until the user says otherwise.
_PORT = 29500
#: The file of variables that DeepSpeed's launcher hands on to other nodes.
EXPORTED = "deepspeed_env"
#: The name of a node, as every launcher takes it.
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_EACH_NODE = "run the command on every node, with NODE_RANK=0 on the first, 1 on the next, and so on"


@dataclass(frozen=True, slots=True)
class Shell:
    """The value of a variable that the shell computes on the node, so it is not quoted."""

    text: str


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of a program: the command to type, files to write, variables to set, and what to know."""

    command: str
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str | Shell] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def shell(self) -> str:
        """Return the command with its variables, as one line."""
        return " ".join([*(f"{name}={_value(value)}" for name, value in self.environment.items()), self.command])


def _value(value: str | Shell) -> str:
    return value.text if isinstance(value, Shell) else shlex.quote(value)


def launch(
    launcher: str,
    *,
    gpus: int,
    nodes: int = 1,
    script: str = "train.py",
    arguments: Sequence[str] = (),
    hosts: Sequence[str] = (),
    environment: Mapping[str, str | Shell] | None = None,
    accelerate_config: str = "",
    folder: str = "",
    local_rank: bool = True,
) -> Launch:
    """The command that starts `script` on `nodes` × `gpus`, to be typed in the folder that relative paths are relative to.

    Args:
        launcher: one of :data:`LAUNCHERS`.
        gpus: a node.
        script: the program.
        arguments: of the program.
        hosts: names of the nodes; ``node0``, ``node1``, … where missing, which the notes then say.
        environment: variables of every rank.
        accelerate_config: the file that ``accelerate launch`` reads. With it, slurm starts accelerate in place of torchrun.
        folder: where the launcher's own files go.
        local_rank: whether DeepSpeed's launcher gives the program ``--local_rank``.

    Raises:
        BadInput: an unknown launcher.
    """
    names = [*hosts, *(f"node{i}" for i in range(len(hosts), nodes))][:nodes]
    variables = dict(environment or {})
    tail = shlex.join([script, *arguments])
    if launcher == "slurm":
        path = os.path.join(folder, "train.sbatch")
        return Launch(f"sbatch {shlex.quote(path)}", {path: _sbatch(gpus, nodes, tail, variables, accelerate_config)})
    unnamed = f"{' and '.join(names[len(hosts) :])} stand for your nodes' names: give them by --hosts"
    made_up = (unnamed,) if nodes > 1 and len(hosts) < nodes else ()
    if launcher == "deepspeed":
        return _deepspeed(gpus, names, tail, variables, folder, local_rank, made_up)
    if launcher == "torchrun":
        if nodes == 1:
            return Launch(f"torchrun --standalone --nproc-per-node {gpus} {tail}", {}, variables)
        meet = f"--rdzv-backend c10d --rdzv-endpoint {names[0]}:{_PORT} --rdzv-id zeroplan"
        command = f"torchrun --nnodes {nodes} --nproc-per-node {gpus} {meet} {tail}"
        return Launch(command, {}, variables, ("run the command on every node", *(_first(names, hosts))))
    if launcher == "accelerate":
        command = f"accelerate launch --config_file {shlex.quote(accelerate_config)}"
        if nodes == 1:
            return Launch(f"{command} {tail}", {}, variables)
        meet = f'--machine_rank "${{NODE_RANK:?}}" --main_process_ip {names[0]} --main_process_port {_PORT}'
        return Launch(f"{command} {meet} {tail}", {}, variables, (_EACH_NODE, *_first(names, hosts)))
    raise BadInput(f"unknown launcher {launcher[:40]!r}", where="--launcher", remedy=f"use one of {', '.join(LAUNCHERS)}")


def require_hosts(launcher: str, names: Sequence[str]) -> None:
    """Refuse names of nodes that the launcher would not take, or take otherwise."""
    remedy = "give names or addresses, by comma: alpha,beta"
    for name in names:
        if _HOST.fullmatch(name) is None:
            raise BadInput(f"{name[:40]!r} is no name of a node", where="--hosts", remedy=remedy)
        if names.count(name) > 1:
            raise BadInput(f"names {name} twice", where="--hosts", remedy=remedy)
    if names and launcher == "slurm":
        raise BadInput("Slurm names the nodes itself", where="--hosts", remedy="leave it out")


def _first(names: Sequence[str], hosts: Sequence[str]) -> tuple[str, ...]:
    return () if hosts else (f"{names[0]} stands for your first node's name: give it by --hosts",)


def _deepspeed(
    gpus: int,
    names: Sequence[str],
    tail: str,
    variables: dict[str, str | Shell],
    folder: str,
    local_rank: bool,
    made_up: tuple[str, ...],
) -> Launch:
    """DeepSpeed's launcher. Variables do not follow it to other nodes but by the file that DS_ENV_FILE names.

    Source: ``deepspeed/launcher/runner.py`` 0.19.8: EXPORT_ENVS, and the file's lines, which are quoted: the shell of a node
    computes nothing in them.
    """
    bare = "" if local_rank else "--no_local_rank "
    nodes = len(names)
    if nodes == 1:
        return Launch(f"deepspeed --num_gpus {gpus} {bare}{tail}", {}, variables)
    _require_plain(tail)
    hostfile = os.path.join(folder, "hostfile")
    files = {hostfile: WRITTEN + "".join(f"{name} slots={gpus}\n" for name in names)}
    notes = list(made_up)
    if shlex.quote(os.getcwd()) != os.getcwd():
        notes.append("DeepSpeed's launcher enters this folder on each node without quotes: use one named by plain letters")
    command = f"deepspeed --hostfile {shlex.quote(hostfile)} --num_nodes {nodes} --num_gpus {gpus} {bare}{tail}"
    plain = {name: value for name, value in variables.items() if isinstance(value, str)}
    if plain:
        exported = os.path.join(folder, EXPORTED)
        files[exported] = "".join(f"{name}={value}\n" for name, value in plain.items())
        return Launch(command, files, {"DS_ENV_FILE": exported}, tuple(notes))
    return Launch(command, files, {}, tuple(notes))


def _require_plain(tail: str) -> None:
    """Refuse names that the shell of another node would take apart.

    Source: ``deepspeed/launcher/multinode_runner.py`` 0.19.8, PDSHRunner: arguments with a space get double quotes, nothing
    else gets any.
    """
    script, *arguments = shlex.split(tail)
    plain = [word for word in arguments if " " not in word or re.search("[$`\\\\]", word)]
    for word in (script, *plain):
        if shlex.quote(word) != word:
            what = f"DeepSpeed's launcher hands {word[:60]!r} to other nodes without quotes"
            raise BadInput(what, where="--launcher", remedy="use --launcher torchrun, or names of plain letters")


def _sbatch(gpus: int, nodes: int, tail: str, variables: Mapping[str, str | Shell], accelerate_config: str) -> str:
    """Write a Slurm script with one task a node; each starts its node's ranks and meets the others at the first node."""
    lines = [
        "#!/bin/bash",
        WRITTEN.rstrip(),
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={gpus}",
        "#SBATCH --exclusive",
        *(f"export {name}={_value(value)}" for name, value in variables.items()),
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    ]
    if accelerate_config:  # whose ranks of nodes are known within the tasks alone
        lines += [
            """srun bash -c 'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' accelerate \\""",
            f'  --config_file {shlex.quote(accelerate_config)} --main_process_ip "$HEAD" --main_process_port {_PORT} \\',
            f"  {tail}",
        ]
    else:
        lines += [
            f"srun torchrun --nnodes {nodes} --nproc-per-node {gpus} --rdzv-backend c10d \\",
            f'  --rdzv-endpoint "$HEAD:{_PORT}" --rdzv-id "$SLURM_JOB_ID" \\',
            f"  {tail}",
        ]
    return "\n".join(lines) + "\n"
