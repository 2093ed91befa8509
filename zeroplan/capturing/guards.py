"""No network and no other programs: what a script asks of them is refused in the way in which it may be missing anywhere."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

#: Variables that keep libraries from asking servers, reporting to them, or building their own kernels.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled", "WANDB_SILENT": "true", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug",
    "MLFLOW_TRACKING_URI": "", "CLEARML_OFFLINE_MODE": "1", "SWANLAB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "DS_SKIP_CUDA_CHECK": "1", "DS_ACCELERATOR": "cuda",
    "TORCHDYNAMO_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "Agg", "HYDRA_FULL_ERROR": "1",
}  # fmt: skip
#: Programs that are asked about the machine or a repository, and change nothing.
_READERS = frozenset(("git", "uname", "ldconfig", "which", "hostname", "lscpu", "lsb_release", "file", "ls", "cat", "pwd"))
#: Of git's verbs those that change nothing.
_GIT = frozenset(
    ("rev-parse", "describe", "status", "diff", "log", "branch", "remote", "config", "ls-files", "show", "--version")
)


def install(card_name: str, card_memory: int, gpus: int) -> None:
    """Refuse connections and other programs from here on; ``nvidia-smi`` answers for the planned GPU."""
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
    smi = "\n".join(f"{card_name}, {card_memory >> 20} MiB" for _ in range(gpus)) + "\n"
    own = subprocess.Popen

    class Popen(own):  # type: ignore[misc, valid-type]
        def __init__(self, args: Any, *rest: Any, **kwargs: Any) -> None:
            words = args.split() if isinstance(args, str) else [os.fsdecode(word) for word in args]
            name = Path(words[0]).name if words else ""
            if name == "nvidia-smi":
                args, kwargs["shell"] = ["printf", "%s", smi], False
            elif name not in _READERS or (name == "git" and not _GIT & set(words[1:3])):
                raise FileNotFoundError(errno.ENOENT, "capture starts no other programs", name)
            super().__init__(args, *rest, **kwargs)

    subprocess.Popen = Popen  # type: ignore[misc]

    def system(command: Any) -> int:
        return 127

    os.system = system
