"""The runtime of two source trees, step by step: ``python -m benchmarks.step.trees OTHER_TREE --rounds 6``.

Both train a small Llama on two gloo ranks by turns, and what counts is the first rank's processor time, which other work on the
machine lengthens least. Printed are, for each stage, the least and the median of it a step, and the bytes that the runtime
holds beside those of its plan (0 where the tree is too old to be asked).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
#: Steps of one turn, of which the first few are not counted.
STEPS, WARM = 40, 8


def turn(stage: int) -> None:
    """One rank's training; the first rank prints its steps' seconds and its bytes as JSON."""
    import time

    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    import zeroplan_runtime
    from zeroplan.core.owned_buffers import runtime_buffers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, use_cache=False, **sizes))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, device="cpu")
    tokens = torch.randint(0, 1000, (2, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds = []
    for _ in range(STEPS):
        begin = time.process_time()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        seconds.append(time.process_time() - begin)
    held = sum(row["peak"] for row in engine.arena.measurement())
    states = getattr(engine, "model_states", None)  # earlier trees have another name
    planned = sum(row.bytes for row in runtime_buffers(states.layout)) if states is not None else 0
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds[WARM:], "held": held, "planned": planned}))
    engine.destroy()
    dist.destroy_process_group()


def run(tree: Path, stage: int) -> dict[str, Any]:
    """One turn with the packages of `tree`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, __file__, "--turn", str(stage)], env=environment, cwd=tree, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    """Compare two trees, or be one rank of a turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="another checkout, built")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--turn", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.turn is not None:
        turn(given.turn)
        return
    if given.other is None:
        parser.error("give the other tree")
    for stage in given.stages:
        seconds: dict[str, list[float]] = {"other": [], "this": []}
        bytes_: dict[str, tuple[int, int]] = {}
        for _ in range(given.rounds):
            for name, tree in (("other", given.other.resolve()), ("this", HERE)):
                found = run(tree, stage)
                seconds[name] += found["seconds"]
                bytes_[name] = (found["held"], found["planned"])
        for name, times in seconds.items():
            held, planned = bytes_[name]
            least, middle = 1e3 * min(times), 1e3 * statistics.median(times)
            print(
                f"stage {stage} {name:5}: {least:7.1f} ms least, {middle:7.1f} ms median; {held:,} bytes, {planned:,} planned"
            )


if __name__ == "__main__":
    main()
