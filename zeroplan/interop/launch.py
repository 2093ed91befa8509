"""What runs a plan: the explicit ds_config, and the commands that start it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.writer import write_ds_config

LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "slurm")
#: Where ranks of several nodes meet, until the user says otherwise.
_PORT = 29500


def explicit_ds_config(zero: ZeroConfig, workload: Workload, layout: ParallelLayout) -> dict[str, Any]:
    """A ds_config that ``deepspeed.initialize`` takes as it is: no ``auto``, batches, precision and optimizer stated."""
    written = find_optimizer(workload.optimizer).written
    block = None if written is None else {"type": written.type, "params": written.params}
    return write_ds_config(zero, workload, world_size=layout.dp, optimizer=block)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a script is started: commands to type, files to write beside it, and variables to set."""

    command: str
    files: dict[str, str]
    environment: dict[str, str]

    def shell(self) -> str:
        """The command with its variables, as one line."""
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.environment.items()), self.command])


def launch(
    launcher: str,
    *,
    gpus: int,
    nodes: int = 1,
    script: str = "train.py",
    arguments: Sequence[str] = (),
    hosts: Sequence[str] = (),
    alloc_conf: str = "",
    accelerate_config: str = "accelerate.yaml",
) -> Launch:
    """The command that starts `script` on `nodes` × `gpus`.

    Args:
        launcher: one of :data:`LAUNCHERS`.
        gpus: a node.
        nodes: nodes.
        script: the user's program.
        arguments: of the program.
        hosts: names of the nodes; made up where missing.
        alloc_conf: for ``PYTORCH_ALLOC_CONF``.
        accelerate_config: the YAML file that ``accelerate launch`` reads.

    Raises:
        BadInput: an unknown launcher.
    """
    names = [*hosts, *(f"node{i}" for i in range(len(hosts), nodes))][:nodes]
    environment = {"PYTORCH_ALLOC_CONF": alloc_conf} if alloc_conf else {}
    tail = shlex.join([script, *arguments])
    if launcher == "deepspeed":
        if nodes == 1:
            return Launch(f"deepspeed --num_gpus {gpus} {tail}", {}, environment)
        hostfile = "".join(f"{name} slots={gpus}\n" for name in names)
        return Launch(
            f"deepspeed --hostfile hostfile --num_nodes {nodes} --num_gpus {gpus} {tail}", {"hostfile": hostfile}, environment
        )
    if launcher == "torchrun":
        if nodes == 1:
            return Launch(f"torchrun --standalone --nproc-per-node {gpus} {tail}", {}, environment)
        meet = f"--rdzv-backend c10d --rdzv-endpoint {names[0]}:{_PORT} --rdzv-id zeroplan"
        return Launch(f"torchrun --nnodes {nodes} --nproc-per-node {gpus} {meet} {tail}", {}, environment)
    if launcher == "accelerate":
        command = f"accelerate launch --config_file {shlex.quote(accelerate_config)} {tail}"
        if nodes > 1:
            command = (
                f"accelerate launch --config_file {shlex.quote(accelerate_config)} --machine_rank $RANK_OF_NODE "
                f"--main_process_ip {names[0]} --main_process_port {_PORT} {tail}"
            )
        return Launch(command, {}, environment)
    if launcher == "slurm":
        return Launch("sbatch train.sbatch", {"train.sbatch": _sbatch(gpus, nodes, tail, environment)}, {})
    raise BadInput(f"unknown launcher {launcher[:40]!r}", where="--launcher", remedy=f"use one of {', '.join(LAUNCHERS)}")


def _sbatch(gpus: int, nodes: int, tail: str, environment: dict[str, str]) -> str:
    """One task a node, each of which starts its ranks by torchrun and meets the others at the first node."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={gpus}",
        "#SBATCH --exclusive",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun torchrun --nnodes {nodes} --nproc-per-node {gpus} --rdzv-backend c10d \\",
        f'  --rdzv-endpoint "$head:{_PORT}" --rdzv-id "$SLURM_JOB_ID" {tail}',
    ]
    return "\n".join(lines) + "\n"
