"""What a launcher sets for the process that it starts, by the launcher's own code where it is Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from zeroplan.capturing.machine import Job


def process_group(job: Job) -> dict[str, str]:
    """The variables of one rank, as torchrun and DeepSpeed's launcher set them."""
    world = job.world
    return {
        "RANK": str(world.rank), "LOCAL_RANK": str(world.local_rank), "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.local_size), "GROUP_RANK": str(world.rank // world.local_size),
        "GROUP_WORLD_SIZE": str(world.nodes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "capture", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


def slurm(job: Job) -> dict[str, str]:
    """The variables of one task, as srun sets them."""
    world = job.world
    return {
        "SLURM_PROCID": str(world.rank), "SLURM_LOCALID": str(world.local_rank), "SLURM_NTASKS": str(world.size),
        "SLURM_NPROCS": str(world.size), "SLURM_NODEID": str(world.rank // world.local_size), "SLURM_NNODES": str(world.nodes),
        "SLURM_JOB_NUM_NODES": str(world.nodes), "SLURM_NTASKS_PER_NODE": str(world.local_size), "SLURM_JOB_ID": "1",
        "SLURM_JOBID": "1", "SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost",
    }  # fmt: skip


def by_accelerate(words: Sequence[str]) -> tuple[dict[str, str], bool]:
    """The variables that ``accelerate launch`` sets with these words, by its own code; and whether it starts a process group.

    Args:
        words: the launcher's flags, the script and its arguments.
    """
    from accelerate.commands import launch

    home: Any = launch
    found: dict[str, str] = {}
    grouped = False

    def simple(args: Any) -> None:
        found.update(home.prepare_simple_launcher_cmd_env(args)[1])

    def several(args: Any) -> None:
        nonlocal grouped
        grouped = True
        found.update(home.prepare_multi_gpu_env(args))

    def deepspeed(args: Any) -> None:
        nonlocal grouped
        grouped = True
        found.update(home.prepare_deepspeed_cmd_env(args)[1])

    home.simple_launcher, home.multi_gpu_launcher, home.deepspeed_launcher = simple, several, deepspeed
    home.launch_command(home.launch_command_parser().parse_args(list(words)))
    return {key: value for key, value in found.items() if os.environ.get(key) != value}, grouped
