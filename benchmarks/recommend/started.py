"""The peak of each run that ``recommend`` prints a command for, beside its plan.

    python -m benchmarks.recommend.started OUT [--cases CASE…] [--seconds N] [--limit N] [--tiny]

Each case asks ``zeroplan recommend`` for one form's files with a script, and starts the printed command as it is, on one GPU.
The model has random weights of a published shape. OUT gets ``started.json``: the command, what the plan says that torch's
allocator holds at most, and what it held when the first rank ended. Exits with 1 where a run failed. Two cases run at a time,
and of those whose launcher takes a fixed port one.

``--tiny`` starts the same commands over a narrow model on a CPU, where nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.from_files.prepare import TINY, bytes_tokenizer
from benchmarks.from_files.run import end
from benchmarks.measure.models import build_config
from benchmarks.measure.worker import versions

ROOT = Path(__file__).resolve().parents[2]
MODEL = "Qwen/Qwen2.5-0.5B"
_ASKED = "--vram 139G --cpu-ram 120G --gpus 1 --global-batch 8 --micro-batch 4 --seq-len 1024"
_HERE, _STAYS = "--offload-optimizer none --offload-param none", "--no-gradient-checkpointing"
#: A name and the words after ``recommend MODEL``, form by form.
CASES = {
    "explicit-2": f"--stage 2 {_HERE} {_STAYS}",
    "explicit-3-ckpt": f"--stage 3 {_HERE} --gradient-checkpointing",
    "explicit-1-fp16": f"--stage 1 --dtype fp16 {_HERE} {_STAYS} --launcher torchrun",
    "explicit-2-lora": f"--stage 2 --lora-rank 16 {_HERE} {_STAYS} --launcher torchrun",
    "explicit-2-host": f"--stage 2 --offload-optimizer cpu {_STAYS} --launcher torchrun",
    "trainer-2": f"--form trainer --stage 2 {_HERE} {_STAYS} --launcher torchrun",
    "trainer-3-lora-ckpt": f"--form trainer --stage 3 --lora-rank 16 {_HERE} --gradient-checkpointing --launcher torchrun",
    "trainer-2-accelerate": f"--form trainer --stage 2 {_HERE} {_STAYS} --launcher accelerate",
    "trl-2": f"--form trl --stage 2 {_HERE} {_STAYS} --launcher torchrun",
    "trl-2-lora": f"--form trl --stage 2 --lora-rank 16 {_HERE} {_STAYS} --launcher torchrun",
    "lightning-2": f"--form lightning --stage 2 {_HERE} {_STAYS}",
    "lightning-3-ckpt": f"--form lightning --stage 3 {_HERE} --gradient-checkpointing",
    "accelerate-2": f"--form accelerate --stage 2 {_HERE} {_STAYS}",
    "accelerate-3-ckpt": f"--form accelerate --stage 3 {_HERE} --gradient-checkpointing",
    "fsdp2-3": f"--engine fsdp2 --stage 3 {_HERE} {_STAYS}",
    "fsdp2-3-lora-ckpt": f"--engine fsdp2 --stage 3 --lora-rank 16 {_HERE} --gradient-checkpointing",
    "accelerate-fsdp2-3": f"--engine fsdp2 --form accelerate-fsdp2 --stage 3 {_HERE} {_STAYS}",
    "ddp": f"--engine ddp {_STAYS}",
    "zeroplan-2": f"--engine zeroplan --stage 2 {_HERE} {_STAYS}",
    "zeroplan-3-host": f"--engine zeroplan --stage 3 --offload-optimizer cpu --offload-param cpu {_STAYS}",
    "zeroplan-2-lora": f"--engine zeroplan --stage 2 --lora-rank 16 {_HERE} {_STAYS}",
}
#: The launchers by their modules: their programs may not be on the path.
_LAUNCHERS = f"""torchrun() {{ {sys.executable} -m torch.distributed.run "$@"; }}
accelerate() {{ shift; {sys.executable} -m accelerate.commands.launch "$@"; }}
deepspeed() {{ {sys.executable} -m deepspeed.launcher.runner "$@"; }}
"""
#: What every process of a command does at its end, where the environment names a file for it.
_AT_EXIT = """import atexit
import os
import sys


def leave():
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    with open(os.environ["STARTED_PEAK"], "w") as file:
        file.write(f"{torch.cuda.max_memory_allocated()} {torch.cuda.max_memory_reserved()}")


if "STARTED_PEAK" in os.environ and os.environ.get("RANK", "0") == "0":
    atexit.register(leave)
"""
#: Keeps DeepSpeed from compiling its collectives for a CPU.
_UNCOMPILED = """
if "LOCAL_RANK" in os.environ and os.environ.get("DS_ACCELERATOR") == "cpu":
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--seconds", type=float, default=480, help="no case begins after so many")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a case may take")
    parser.add_argument("--tiny", action="store_true", help="a narrow model on a CPU")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    folder = (asked.out / "work").resolve()
    make_model(folder, tiny=asked.tiny)
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(_AT_EXIT + (_UNCOMPILED if asked.tiny else ""))
    begin, port, rows = time.monotonic(), Lock(), []

    def one(name: str) -> dict[str, Any]:
        if time.monotonic() - begin > asked.seconds:
            return {"case": name, "error": "not started"}
        began = time.monotonic()
        row = run(name, folder, asked.out, asked.limit, port, tiny=asked.tiny)
        return {**row, "seconds": round(time.monotonic() - began, 1)}

    with ThreadPoolExecutor(2) as pool:
        for row in pool.map(one, asked.cases):
            rows.append(row)
            answer = {"model": MODEL, "versions": versions(), "rows": rows}
            (asked.out / "started.json").write_text(json.dumps(answer, indent=1) + "\n")
            print(line_of(row), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return int(any(row.get("error") for row in rows))


def make_model(folder: Path, *, tiny: bool) -> None:
    """Write the model's config and a tokenizer below `folder`: without weights a script begins with random ones."""
    place = folder / MODEL
    config = build_config(MODEL, TINY if tiny else {})
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(place)
    bytes_tokenizer().save_pretrained(place)


def run(name: str, folder: Path, out: Path, limit: float, port: Lock, *, tiny: bool) -> dict[str, Any]:
    """Ask for the case's files, start the printed command, and return what was planned and what was measured."""
    words = [MODEL, *_ASKED.split(), *CASES[name].split(), "-o", f"{name}/", "--new-script", f"{name}/train.py"]
    words += ["--optimizer", "sgd", "--depth", "formula", "--seq-len", "16"] if tiny else []
    row: dict[str, Any] = {"case": name, "asked": " ".join(words)}
    path = os.pathsep.join([str(folder / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path} | ({"DS_ACCELERATOR": "cpu"} if tiny else {})
    (folder / name).mkdir(exist_ok=True)
    said = subprocess.run(
        [sys.executable, "-m", "zeroplan", "recommend", *words, "--json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if said.returncode not in (0, 1) or "{" not in said.stdout:
        return row | {"error": said.stderr[-500:]}
    answer = json.loads(said.stdout[said.stdout.index("{") :])
    gpu, command = answer["ranking"][0]["plan"]["gpu"], answer["files"]["start"]
    row |= {"command": command, "planned": {key: gpu[key] for key in ("peak_allocated", "peak_reserved")}}
    peak = folder / f"{name}.peak"
    environment |= {"STARTED_PEAK": str(peak)}
    fixed = command.split()[0] != "torchrun" and " torchrun " not in command
    with port if fixed else nullcontext(), (out / f"{name}.log").open("w") as log:
        started = subprocess.Popen(["bash", "-c", _LAUNCHERS + command], cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            row["code"] = started.wait(limit)
        except subprocess.TimeoutExpired:
            end(started)
            return row | {"error": f"ran over {limit:.0f} s"}
    if row["code"]:
        return row | {"error": _reason((out / f"{name}.log").read_text())}
    if not peak.exists():
        return row if tiny else row | {"error": "no peak was left"}
    allocated, reserved = map(int, peak.read_text().split())
    return row | {"measured": {"peak_allocated": allocated, "peak_reserved": reserved}}


def _reason(log: str) -> str:
    """Return the first line of a log that names an error of the program, else its last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\w*(Error|Exception)\b: ", line) and "ChildFailed" not in line]
    return (named or lines or ["no output"])[0 if named else -1][-500:]


def line_of(row: dict[str, Any]) -> str:
    """Say a row in one line."""
    if row.get("error"):
        return f"{row['case']:<22} FAILED: {row['error'].strip().splitlines()[-1][:160]}"
    measured, planned = row.get("measured"), row["planned"]
    if measured is None:
        return f"{row['case']:<22} ran"
    cells = [f"{key.removeprefix('peak_')} {_gib(planned[key])} planned, {_gib(measured[key])} measured" for key in measured]
    exact = planned["peak_allocated"]
    off = f" ({measured['peak_allocated'] / exact - 1:+.2%})" if exact else ""
    return f"{row['case']:<22} {'; '.join(cells)}{off}"


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.3f}"


if __name__ == "__main__":
    sys.exit(main())
