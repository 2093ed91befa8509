"""Allocates and frees at random on a GPU, and writes the history: the child process of test_allocator_on_gpu.py.

    PYTORCH_ALLOC_CONF=... python random_program.py SEED FRACTION STREAMS OUT.json

Memory is limited to FRACTION of the GPU's; STREAMS above 1 uses several and lets some blocks wait for another.
"""

from __future__ import annotations

import json
import random
import sys

import torch

STEPS = 6000
LARGEST = 96 << 20


def main(seed: int, fraction: float, streams: int, out: str) -> None:
    rng = random.Random(seed)
    torch.cuda.init()
    total = torch.cuda.mem_get_info()[1]
    if fraction < 1:
        torch.cuda.set_per_process_memory_fraction(fraction)
    budget = min(int(0.7 * fraction * total), 4 << 30)
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=10**6)
    queues = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(streams - 1))]
    live: list[torch.Tensor] = []
    try:
        for step in range(STEPS):
            held = sum(tensor.numel() for tensor in live)
            if live and (held > budget or rng.random() < 0.47):
                tensor = live.pop(rng.randrange(len(live)))
                if streams > 1 and rng.random() < 0.3:
                    tensor.record_stream(rng.choice(queues))
                del tensor
            else:
                odd, even = int(2 ** rng.uniform(0, 26.5)), rng.choice((1 << 20, 20 << 20, 30 << 20, LARGEST))
                size = odd if rng.random() < 0.7 else even
                with torch.cuda.stream(rng.choice(queues)):
                    live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            if fraction == 1 and step % 1500 == 1499:
                torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        pass  # the history says so
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    keys = ("action", "addr", "size", "stream")
    with open(out, "w") as file:
        json.dump({"total": total, "device_traces": [[{key: entry[key] for key in keys} for entry in trace]]}, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
