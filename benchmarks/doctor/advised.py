"""Runs that the host's limit stops, and the change that ``zeroplan doctor`` advises for them, run under the same limit.

    python -m benchmarks.doctor.advised OUT [--only NAME]

Two gloo ranks train on the CPU, each allowed the bytes that the case states; see :mod:`benchmarks.doctor.capped`. The first run
must die of them. ``zeroplan doctor LOG MODEL --vram …`` reads its log, for a card that leaves torch the same bytes, and names
the smallest change that fits; the second run has that change and nothing else. OUT gets both logs of each case and
``advised.json``; exits with 1 unless each second run ends well. What a GPU's allocator would do stays untested here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from zeroplan.core.gpus import DRIVER_RESERVE

MIB = 1 << 20
#: Seconds after which a run that hangs is ended.
_LONGEST = 150
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
WIDE = {**MODEL, "hidden_size": 768, "intermediate_size": 2048}
_BASE = {"grad_accum": 1, "checkpointing": False, "steps": 3, "model": MODEL}
#: Settings of the runs that fail; `allowed` MiB of each rank.
CASES: dict[str, dict[str, Any]] = {
    "activations": {"engine": "zeroplan", "stage": 2, "micro_batch": 16, "seq_len": 256, "allowed": 430},
    "states": {"engine": "zeroplan", "stage": 0, "micro_batch": 1, "seq_len": 64, "allowed": 740, "model": WIDE},
    "deepspeed": {"engine": "deepspeed", "stage": 0, "micro_batch": 16, "seq_len": 256, "allowed": 560},
}
_FLAGS = {"--stage": "stage", "--micro-batch": "micro_batch", "--grad-accum": "grad_accum"}


def main() -> int:
    """Run the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    found = {name: _pair(asked.out, name, {**_BASE, **case}) for name, case in CASES.items() if asked.only in name}
    path = asked.out / "advised.json"
    known = json.loads(path.read_text()) if asked.only and path.exists() else {}
    path.write_text(json.dumps(known | found, indent=2) + "\n")
    for name, one in found.items():
        print(f"{name}: {one['cause']}, advised {one['advised']!r}, which {'ends well' if one['fits'] else 'does not fit'}")
    return 0 if all(one["cause"] == "host_memory" and one["fits"] for one in found.values()) else 1


def _pair(out: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    before = _run(out, name, settings)
    model = out / "model.json"
    model.write_text(json.dumps(settings["model"]))
    words = [str(out / f"{name}.log"), str(model), "--engine", settings["engine"], "--gpus", "2", "--dtype", "bf16"]
    words += ["--stage", str(settings["stage"]), "--seq-len", str(settings["seq_len"])]
    words += ["--offload-optimizer", "none", "--offload-param", "none"]
    # A GPU also holds its context, and its driver a share (see Cluster.usable_vram), which a CPU's rank has no part in.
    needed = settings["allowed"] * MIB + _doctor([*words, "--vram", "80"])["plan"]["plan"]["gpu"]["outside_torch"]
    card = (needed + min(DRIVER_RESERVE, needed // 15)) / MIB
    answer = _doctor([*words, "--vram", f"{card:.1f}MiB"])
    relief = (answer["plan"] or {}).get("relief")
    kept = {"settings": {k: v for k, v in settings.items() if k != "model"}, "died": not before, "cause": answer["cause"]}
    kept["planned"] = answer["plan"]["plan"]["gpu"]["peak_allocated"]
    if relief is None:
        return {**kept, "advised": None, "fits": False}
    return {**kept, "advised": relief["flags"], "fits": _run(out, f"{name}-advised", _changed(settings, relief["flags"]))}


def _changed(settings: dict[str, Any], flags: str) -> dict[str, Any]:
    """Return the settings with the doctor's flags."""
    changed, words = dict(settings), flags.split()
    while words:
        flag = words.pop(0)
        if flag == "--gradient-checkpointing":
            changed["checkpointing"] = True
        else:
            changed[_FLAGS[flag]] = int(words.pop(0))
    return changed


def _doctor(words: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "zeroplan", "doctor", *words, "--json"], capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _run(out: Path, name: str, settings: dict[str, Any]) -> bool:
    """Run, keep the log, and return whether the run ended well."""
    path = (out / f"{name}.json").resolve()
    path.write_text(json.dumps({**settings, "allowed": settings["allowed"] * MIB}))
    script = Path(__file__).with_name("capped.py")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")])}
    with (out / f"{name}.log").open("w+") as log:
        started = subprocess.Popen(launched, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            started.wait(timeout=_LONGEST)
        except subprocess.TimeoutExpired:  # a rank that hangs after the other's error
            os.killpg(started.pid, signal.SIGTERM)
            started.wait(timeout=30)
        log.seek(0)
        return started.returncode == 0 and "Training completed" in log.read()


if __name__ == "__main__":
    raise SystemExit(main())
