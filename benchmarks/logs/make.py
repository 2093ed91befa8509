"""Makes logs of runs that fail on purpose: ``python -m benchmarks.logs.make OUT [--only NAME]``.

Each case runs in a fresh process under the launcher that people use, on a GPU whose memory is capped, or on the CPU with gloo
ranks, whose address space, disk or shared memory is; what it prints goes to ``OUT/NAME.log``. The cases of a GPU need one;
those with a small disk need the right to mount one (``unshare -m``). ``tests/logs/real`` keeps what they printed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: Seconds after which a run that hangs is ended.
LONGEST = 150


@dataclass(frozen=True, slots=True)
class LogRun:
    """How a case is started: its `script`, the `launcher` over how many `ranks`, and what it `mounts` first."""

    script: str
    launcher: str = "python"
    ranks: int = 1
    mounts: str = ""  # "shm" or "disk"
    gpu: bool = False
    #: Ranks of a run before it, whose output is not kept.
    before: int = 0


def _all(script: str, launcher: str, ranks: int, *names: str, **options: object) -> dict[str, LogRun]:
    return {name: LogRun(script, launcher, ranks, **options) for name in names}  # type: ignore[arg-type]


CASES = {
    **_all("failing", "python", 1, "oom_load", "oom_forward", "oom_loss", "oom_backward", "oom_step", "oom_save", gpu=True),
    **_all("failing", "python", 1, "oom_fragmented", "oom_driver", "oom_trainer", "fp16_overflow", "fine_trainer", gpu=True),
    **_all("failing", "torchrun", 2, "oom_two_ranks", gpu=True),
    **_all("failing", "python", 1, "nan_trainer", "nan_plain", "killed_plain", "cpu_refused", "key_error", "fine_plain"),
    **_all("failing", "torchrun", 2, "killed_rank", "stuck_gloo"),
    **_all("host", "python", 1, "refused_plain", "refused_list", "refused_numpy", "refused_load", "refused_threads"),
    **_all("host", "python", 1, "refused_trainer", "refused_lightning", "file_limit", "killed_trainer"),
    **_all("host", "python", 1, "killed_spawn", "killed_worker", "killed_worker_trainer"),
    **_all("host", "torchrun", 1, "refused_deepspeed", "refused_runtime"),
    **_all("host", "torchrun", 2, "killed_torchrun", "refused_offload"),
    **_all("host", "accelerate", 1, "refused_accelerate", "killed_accelerate"),
    **_all("host", "deepspeed", 2, "killed_deepspeed"),
    **_all("host", "python", 1, "shm_worker", mounts="shm"),
    **_all("host", "python", 1, "disk_save", "disk_trainer", "disk_lightning", mounts="disk"),
    **_all("host", "deepspeed", 2, "disk_deepspeed", mounts="disk"),
    **_all("ranks", "torchrun", 2, "hang_ddp", "hang_monitored", "fewer_batches", "type_error_rank", "segfault"),
    **_all("ranks", "torchrun", 2, "error_runtime", "terminated_launcher", "key_error_accelerate"),
    **_all("ranks", "python", 1, "hang_join", "error_lightning", "index_error", "shape_error_trainer"),
    **_all("ranks", "python", 1, "port_in_use", "abort_trainer", "interrupted"),
    **_all("ranks", "deepspeed", 2, "value_error_deepspeed", "batch_sizes"),
    **_all("ranks", "torchrun", 1, "resume_ranks", before=2),
    **_all("losses", "python", 1, "nan_rate", "nan_half", "nan_lightning", "nan_anomaly"),
    **_all("losses", "python", 1, "scale_plain", "scale_settles", "slow_trainer", "slow_memory"),
    **_all("losses", "python", 1, "fine_cpu_trainer", "fine_lightning", "fine_retry"),
    **_all("losses", "deepspeed", 2, "nan_deepspeed", "fp16_refused", "fine_deepspeed"),
    **_all("losses", "torchrun", 1, "scale_floor"),
    **_all("losses", "torchrun", 2, "fine_runtime", "nan_accelerate", "fine_accelerate"),
    **_all("host_again", "python", 1, "loader_memory", "safetensors_memory", "torch_load_memory"),
    **_all("host_again", "python", 1, "memmap_memory", "tokenizer_memory", "spawn_memory", "logits_memory"),
    **_all("host_again", "python", 1, "killed_subprocess", "killed_lightning", "killed_pool", "crash_spawn"),
    **_all("host_again", "python", 1, "terminated_plain", "interrupted_lightning", "limit_safetensors"),
    **_all("host_again", "python", 1, "disk_safetensors", "disk_numpy", mounts="disk"),
    **_all("host_again", "torchrun", 2, "killed_runtime"),
    **_all("losses_again", "python", 1, "nan_log", "nan_autocast", "nan_eval", "nan_guard", "nan_clip"),
    **_all("losses_again", "python", 1, "nan_early_stopping", "scale_megatron", "fine_megatron", "slow_tqdm"),
    **_all("losses_again", "python", 1, "slow_iterations", "fine_words", "fine_resume", "fine_early_stopping"),
    **_all("losses_again", "python", 1, "fine_spike", "fine_spawn"),
    **_all("losses_again", "torchrun", 1, "nan_runtime"),
    **_all("losses_again", "torchrun", 2, "nan_division", "fine_runtime_save"),
    **_all("ranks_again", "accelerate", 1, "shape_accelerate"),
    **_all("ranks_again", "deepspeed", 2, "frozen_deepspeed"),
    **_all("ranks_again", "python", 1, "barrier_lightning", "gather_spawn", "collate_worker", "missing_keys"),
    **_all("ranks_again", "python", 1, "size_mismatch", "other_device", "no_cuda", "label_range"),
    **_all("ranks_again", "python", 1, "no_checkpoint", "port_spawn"),
    **_all("ranks_again", "torchrun", 2, "left_accelerate", "store_wait", "unused_parameters", "folder_runtime"),
}


def main() -> int:
    """Run the cases that this machine can run."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="A regular expression that the whole name matches.")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        if (torch.cuda.is_available() or not case.gpu) and re.fullmatch(arguments.only or ".*", name):
            text, code = run(name, case)
            (arguments.out / f"{name}.log").write_text(text)
            print(name, "exit", code, flush=True)
    return 0


def run(name: str, case: LogRun) -> tuple[str, int]:
    """Run a case as a user's shell does; return what it prints, without this machine's folders, and its exit code."""
    with tempfile.TemporaryDirectory() as disk:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "SMALL_DISK": disk}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        words = [*_mounted(case.mounts), *_launched(case.launcher, case.ranks), str(HERE / f"{case.script}.py"), name]
        if case.before:
            first = [*_launched(case.launcher, case.before), *words[-2:]]
            subprocess.run(
                first, env=environment, check=True, timeout=LONGEST, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        shell = '"$@"; code=$?; [ $code -gt 128 ] && echo "exit code: $code"; exit $code'
        with tempfile.TemporaryFile() as out:
            started = subprocess.Popen(
                ["bash", "-c", shell, "run", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                started.wait(timeout=LONGEST)
            except subprocess.TimeoutExpired:  # a rank that hangs, as after another's error
                os.killpg(started.pid, signal.SIGTERM)
                started.wait(timeout=30)
            out.seek(0)
            text = out.read().decode("utf-8", "replace")
    return _without_paths(text), started.returncode


def _launched(launcher: str, ranks: int) -> list[str]:
    """Return the words that start a script over so many ranks."""
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if launcher == "accelerate":
        words = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(ranks)]
        return [*words, "--num_machines", "1", "--mixed_precision", "no"]
    if launcher == "deepspeed":
        words = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
        return [*words, "--master_port", _free_port()]
    return [sys.executable]


def _free_port() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


def _mounted(what: str) -> list[str]:
    """Return the words that give a command a small disk or a small ``/dev/shm`` of its own."""
    if not what:
        return []
    mount = "mount -t tmpfs -o size=4m tmpfs /dev/shm" if what == "shm" else 'mount -t tmpfs -o size=16m tmpfs "$SMALL_DISK"'
    return ["unshare", "-m", "bash", "-c", f'{mount} && exec "$@"', "bash"]


def _without_paths(text: str) -> str:
    """Return the text with this machine's folders cut down to what any machine has."""
    text = (
        text.replace(str(Path(sys.prefix)), "/venv")
        .replace(socket.gethostname(), "node1")
        .replace(str(Path(sys.base_prefix)), "/usr")
    )
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and Path(folder) != ROOT:
            text = text.replace(folder, "/venv/lib/python3/site-packages")
    for folder in sorted({str(ROOT), str(Path.home()), os.getcwd()}, key=len, reverse=True):
        text = text.replace(folder, "/home/user")
    return text


if __name__ == "__main__":
    raise SystemExit(main())
