"""No network and no other programs: what a script asks of them is refused in the way in which it may be missing anywhere."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Callable
from multiprocessing import context
from pathlib import Path
from typing import Any

from zeroplan.capturing.machine import DRIVER_VERSION, PlannedCard

#: Variables that keep libraries from asking servers, reporting to them, or building their own kernels.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled", "WANDB_SILENT": "true", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug",
    "MLFLOW_TRACKING_URI": "", "CLEARML_OFFLINE_MODE": "1", "SWANLAB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "DS_SKIP_CUDA_CHECK": "1", "DS_ACCELERATOR": "cuda",
    "TORCHDYNAMO_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "Agg", "HYDRA_FULL_ERROR": "1",
    "PYTHONBREAKPOINT": "0",
}  # fmt: skip
#: Programs that are asked about the machine or a repository, and change nothing.
_READERS = frozenset(("git", "uname", "ldconfig", "which", "hostname", "lscpu", "lsb_release", "file", "ls", "cat", "pwd"))
#: Of git's verbs those that change nothing.
_GIT = frozenset(
    ("rev-parse", "describe", "status", "diff", "log", "branch", "remote", "config", "ls-files", "show", "--version")
)


def _smi(words: list[str], card: PlannedCard, gpus: int, live: int) -> str:
    """What ``nvidia-smi`` prints: the fields that are asked for, of each GPU; the first holds what the script has there."""
    asked = next((word.partition("=")[2] for word in words if word.startswith("--query-gpu=")), "name,memory.total").split(",")
    form = next((word for word in words if word.startswith("--format=")), "--format=csv,noheader" if words else "")
    if "-L" in words:
        return "".join(f"GPU {at}: {card.name} (UUID: GPU-{at})\n" for at in range(gpus))
    lines = [] if "noheader" in form or not words else [", ".join(asked)]
    for at in range(gpus):
        used = live if at == 0 else 0
        sizes = {"memory.total": card.memory, "memory.used": used, "memory.free": card.memory - used}
        texts = {"name": card.name, "gpu_name": card.name, "count": str(gpus), "index": str(at), "uuid": f"GPU-{at}",
                 "driver_version": DRIVER_VERSION, "compute_cap": ".".join(map(str, card.capability))}  # fmt: skip
        unit = "" if "nounits" in form else " MiB"
        lines.append(", ".join(f"{sizes[one] >> 20}{unit}" if one in sizes else texts.get(one, "0") for one in asked))
    return "\n".join(lines) + "\n"


def install(card: PlannedCard, gpus: int, live: Callable[[], int]) -> None:
    """Refuse connections and other programs from here on; ``nvidia-smi`` answers for the planned GPU.

    Args:
        card: the GPU.
        gpus: how many there are.
        live: returns the bytes of its GPU that NVML counts as the script's now.
    """
    connect = socket.socket.connect

    def refused(sock: socket.socket, address: Any) -> Any:
        if sock.family == getattr(socket, "AF_UNIX", -1):
            return connect(sock, address)
        raise OSError(errno.ENETUNREACH, "capture has no network")

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "capture has no network")

    plain: Any = socket.socket
    plain.connect, plain.connect_ex = refused, lambda sock, address: errno.ENETUNREACH
    socket.getaddrinfo = unknown
    own = subprocess.Popen

    class Popen(own):  # type: ignore[misc, valid-type]
        def __init__(self, args: Any, *rest: Any, **kwargs: Any) -> None:
            words = args.split() if isinstance(args, str) else [os.fsdecode(word) for word in args]
            name = Path(words[0]).name if words else ""
            if name == "mkdir":  # in the temporary folder, as all that is written
                for word in words[1:]:
                    if not word.startswith("-"):
                        os.makedirs(word, exist_ok=True)
                args, kwargs["shell"] = ["true"], False
            elif name == "nvidia-smi":
                args, kwargs["shell"] = ["printf", "%s", _smi(words[1:], card, gpus, live())], False
            elif name not in _READERS or (name == "git" and not _GIT & set(words[1:3])):
                raise FileNotFoundError(errno.ENOENT, "capture starts no other programs", name)
            super().__init__(args, *rest, **kwargs)

    subprocess.Popen = Popen  # type: ignore[misc]

    def system(command: Any) -> int:
        try:
            return subprocess.run(command, shell=True, check=False).returncode
        except OSError:
            return 127

    def replaced(path: Any, *_: Any) -> Any:
        from zeroplan.capturing.recorder import StoppedError
        from zeroplan.capturing.source import user_line

        says = f"the script goes on as another program ({os.fsdecode(path)[-60:]}), which is not captured: capture that command"
        raise StoppedError(says, user_line())

    process, leave = os.getpid(), os._exit

    def left(code: int) -> Any:
        if os.getpid() != process:
            leave(code)  # of a process that was forked
        raise SystemExit(code)

    system_home: Any = os
    system_home._exit = left
    system_home.system, system_home.execv, system_home.execve = system, replaced, replaced
    system_home.posix_spawn = system_home.posix_spawnp = replaced
    # Processes that are started anew would know nothing of a capture; those that are forked go on in it.
    contexts: Any = context
    contexts._concrete_contexts.update(dict.fromkeys(("spawn", "forkserver"), contexts._concrete_contexts["fork"]))
