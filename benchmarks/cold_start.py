"""The time of a cold ``zeroplan estimate``, beside what it must import and beside DeepSpeed's estimator on a live model.

``python -m benchmarks.cold_start [--runs 11] [--live] [--json FILE]``. Correctness first: the answer holds the model's
exact parameter count. Each command runs in a fresh process, in turn, so that a drift of the machine's speed touches all
alike; medians are printed, and the ratio to the bare imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SMALL, LARGE = "openai-community/gpt2", "meta-llama/Llama-3.1-405B"
IMPORTS = "import typer, pydantic, tabulate"
LIVE = """
from transformers import AutoConfig, AutoModelForCausalLM
from zeroplan.models.load import load_model
config = dict(load_model("meta-llama/Llama-3.2-1B").config)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=1)
"""


def commands() -> dict[str, list[str]]:
    """Name → command line."""
    estimate = [sys.executable, "-m", "zeroplan", "estimate"]
    return {
        "bare imports": [sys.executable, "-c", IMPORTS],
        "estimate, formula": [*estimate, "meta-llama/Llama-3.2-1B", "--gpus", "8", "--depth", "formula"],
        "estimate, default depth": [*estimate, "meta-llama/Llama-3.2-1B", "--gpus", "8"],
        "estimate, smallest": [*estimate, SMALL, "--gpus", "8", "--depth", "formula"],
        "estimate, largest": [*estimate, LARGE, "--gpus", "8", "--depth", "formula"],
    }


def check() -> None:
    """The answer is right before it is timed."""
    out = subprocess.run([*commands()["estimate, formula"], "--why"], capture_output=True, text=True, check=True).stdout
    assert "1,235,814,400 parameters" in out, out


def timed(command: list[str]) -> float:
    """Time one fresh process; returns wall seconds."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Time, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--live", action="store_true", help="also DeepSpeed's estimator on a live 1B model (a minute, 6 GiB)")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "cold_start.json")
    args = parser.parse_args()
    check()
    todo = commands()
    samples: dict[str, list[float]] = {name: [] for name in todo}
    for index in range(args.runs + 1):
        for name, command in todo.items():
            seconds = timed(command)
            if index:  # the first round warms the file cache
                samples[name].append(seconds)
    base = statistics.median(samples["bare imports"])
    result: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count(), "runs": args.runs, "seconds": {}}
    for name, values in samples.items():
        median = statistics.median(values)
        result["seconds"][name] = {"median": round(median, 4), "min": round(min(values), 4), "max": round(max(values), 4)}
        spread = f"min {min(values):.3f}  max {max(values):.3f}"
        print(f"{name:<26} median {median:.3f} s  {spread}  {median / base:5.2f} × bare imports")
    if args.live:
        seconds = timed([sys.executable, "-c", LIVE])
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        mine = result["seconds"]["estimate, formula"]["median"]
        result["deepspeed_live"] = {"seconds": round(seconds, 1), "peak_gib": round(memory, 2)}
        print(f"{'DeepSpeed, live 1B model':<26} {seconds:.1f} s, {memory:.1f} GiB: {seconds / mine:.0f} × ours")
    result["command"] = "python -m benchmarks.cold_start" + (" --live" if args.live else "")
    from zeroplan.core.plumbing.files import write_atomic

    write_atomic(args.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
