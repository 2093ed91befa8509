"""CPU seconds and memory of searches over layouts and of large plans: ``python -m benchmarks.layouts.search [--only TEXT]``.

Each command runs in a process of its own with an empty cache of tapes. CPU time, user and system, is what counts: it hardly
depends on what else the machine does. The compiled allocator should be there, as it is where the package is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from zeroplan.models.load import load_model
from zeroplan.simulate.allocator import native

#: What is run; of models that no tape is shipped of, CONFIG and DENSE stand for files.
COMMANDS = {
    "Llama 3.1 70B on 8 × 8 H100, --layouts": (
        *("recommend", "meta-llama/Llama-3.1-70B", "--gpu", "8xH100", "--nodes", "8", "--seq-len", "8192", "--layouts"),
    ),
    "Llama 3.1 405B on 2,048 × 8 H100, --layouts": (
        *("recommend", "meta-llama/Llama-3.1-405B", "--gpu", "8xH100", "--nodes", "2048", "--seq-len", "8192", "--layouts"),
    ),
    "Llama 3.1 405B on 64 × 8 H100, --layouts": (
        *("recommend", "meta-llama/Llama-3.1-405B", "--gpu", "8xH100", "--nodes", "64", "--seq-len", "8192", "--layouts"),
    ),
    "1T dense on 384 × 8 A100, --layouts": (
        *("recommend", "DENSE", "--gpu", "8xA100-80G", "--nodes", "384", "--seq-len", "2048", "--layouts"),
    ),
    "DeepSeek-V3 on 256 × 8 H100, --layouts": (
        *("recommend", "deepseek-ai/DeepSeek-V3", "--gpu", "8xH100", "--nodes", "256", "--seq-len", "4096", "--layouts"),
    ),
    "DeepSeek-V3 on the fewest nodes of H200": ("recommend", "deepseek-ai/DeepSeek-V3", "--gpu", "H200", "--nodes", "?"),
    "DeepSeek-V3 on 2,048 GPUs": (
        *("estimate", "deepseek-ai/DeepSeek-V3", "--gpu", "8xH200", "--nodes", "256", "--pp", "16", "--ep", "64"),
        *("--stage", "2", "--engine", "fsdp2", "--grad-accum", "64", "--seq-len", "4096"),
    ),
    "an unknown 405B at tp 8 × pp 16": (
        *("estimate", "CONFIG", "--gpu", "8xH100", "--nodes", "16", "--tp", "8", "--pp", "16", "--stage", "2"),
        *("--engine", "fsdp2", "--grad-accum", "32", "--seq-len", "8192"),
    ),
}


def unknown_405b() -> dict[str, object]:
    """Return the config of Llama 3.1 405B with another number of channels in its MLPs, which no tape is shipped of."""
    config = dict(load_model("meta-llama/Llama-3.1-405B").config)
    return config | {"intermediate_size": int(config["intermediate_size"]) - 1024}


def one_trillion() -> dict[str, object]:
    """Return the config of a Llama of the size of Narayanan et al. 2021's largest, with 1,008 billion parameters."""
    heads = {"num_attention_heads": 160, "num_key_value_heads": 160, "num_hidden_layers": 128, "vocab_size": 51200}
    return dict(load_model("meta-llama/Llama-3.1-405B").config) | {"hidden_size": 25600, "intermediate_size": 68096, **heads}


def main() -> None:
    """Run the commands one after the other, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    print("allocator:", "compiled" if native.available() else "in Python")
    for title, words in COMMANDS.items():
        if only not in title:
            continue
        with TemporaryDirectory() as folder:
            files = {"CONFIG": unknown_405b(), "DENSE": one_trillion()}
            for name, config in files.items():
                Path(folder, f"{name}.json").write_text(json.dumps(config))
            asked = [str(Path(folder, f"{word}.json")) if word in files else word for word in words]
            said = Path(folder, "said.txt")
            with said.open("w") as out:
                command = [sys.executable, "-m", "zeroplan", *asked]
                child = subprocess.Popen(command, env=os.environ | {"XDG_CACHE_HOME": folder}, stdout=out)
                _, _, used = os.wait4(child.pid, 0)
            first = next(iter(said.read_text().splitlines()), "no answer")
        print(f"{title}: {used.ru_utime + used.ru_stime:.1f} s, {used.ru_maxrss / 2**20:.2f} GiB. {first}", flush=True)


if __name__ == "__main__":
    main()
