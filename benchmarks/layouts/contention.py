"""What a collective and the kernels beside it take from each other:

    torchrun --nproc-per-node 2 -m benchmarks.layouts.contention FILE

A line of JSON for each collective and its size: GB/s of the bus alone, and beside copies, large products and an expert layer's
grouped products, each with what these take then over what they take alone. Both sides are kept busy for as long; those count
that run in the first half, when neither is done.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from zeroplan.search.collectives import Collective

#: Bytes of the whole buffer: a block of Llama 3.2 1B and one of Qwen3-30B-A3B in bf16; two of hidden states.
_SIZES = {
    Collective.ALL_GATHER: (122 << 20, 1250 << 20),
    Collective.REDUCE_SCATTER: (244 << 20, 2500 << 20),
    Collective.ALL_REDUCE: (16 << 20, 64 << 20),
}
_SECONDS = 0.08
#: Tokens times experts a token, experts, hidden and expert width of Qwen3-30B-A3B at 4,096 tokens.
_ROWS, _EXPERTS, _HIDDEN, _WIDTH = 32768, 128, 2048, 768

Call = Callable[[], object]


def collective(kind: Collective, size: int) -> Call:
    """Return a collective of so many bytes; gradients are reduced in fp32, all else is in bf16."""
    world = dist.get_world_size()
    dtype = torch.float32 if kind is Collective.REDUCE_SCATTER else torch.bfloat16
    whole = torch.zeros(size // dtype.itemsize // world * world, dtype=dtype, device="cuda")
    part = torch.zeros(whole.numel() // world, dtype=dtype, device="cuda")
    if kind is Collective.ALL_GATHER:
        return partial(dist.all_gather_into_tensor, whole, part)
    if kind is Collective.REDUCE_SCATTER:
        return partial(dist.reduce_scatter_tensor, part, whole)
    return partial(dist.all_reduce, whole)


def kernels() -> dict[str, Call]:
    """Return the kernels that run beside a collective."""
    source = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
    target = torch.zeros_like(source)
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    tokens = torch.randn(_ROWS, _HIDDEN, dtype=torch.bfloat16, device="cuda")
    experts = torch.randn(_EXPERTS, 2 * _WIDTH, _HIDDEN, dtype=torch.bfloat16, device="cuda").transpose(-2, -1)
    ends = torch.arange(1, _EXPERTS + 1, dtype=torch.int32, device="cuda") * (_ROWS // _EXPERTS)
    return {
        "copy": lambda: target.copy_(source),
        "product": lambda: left @ right,
        "grouped product": lambda: torch._grouped_mm(tokens, experts, offs=ends),
    }


def timed(run: Call, count: int, stream: torch.cuda.Stream) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    """Issue a call so often on a stream, and return the events around each."""
    found = []
    with torch.cuda.stream(stream):
        for _ in range(count):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            found.append((begin, end))
    return found


def _median(spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    """Return the median seconds of what ran early, when the other side was not done yet."""
    early = spans[len(spans) // 8 : max(len(spans) // 2, len(spans) // 8 + 1)]
    return float(median(begin.elapsed_time(end) for begin, end in early)) / 1e3


def alone(run: Call, stream: torch.cuda.Stream) -> float:
    """Return the seconds of a call by itself."""
    timed(run, 3, stream)
    torch.cuda.synchronize()
    dist.barrier()
    spans = timed(run, 20, stream)
    torch.cuda.synchronize()
    return _median(spans)


def together(sent: Call, own: Call, seconds: tuple[float, float], streams: tuple[Any, Any]) -> tuple[float, float]:
    """Return the seconds of a collective and of a kernel while both run, given those of each by itself."""
    dist.barrier()
    torch.cuda.synchronize()
    counts = [max(4, round(_SECONDS / one)) for one in seconds]
    first, second = timed(sent, 0, streams[0]), timed(own, 0, streams[1])
    while counts[0] or counts[1]:  # issued in turn, so that neither waits for the host
        for at, (run, spans) in enumerate(((sent, first), (own, second))):
            some = min(counts[at], max(1, counts[at] // max(1, min(filter(None, counts), default=1))))
            spans += timed(run, some, streams[at])
            counts[at] -= some
    torch.cuda.synchronize()
    return _median(first), _median(second)


def main() -> None:
    """Measure, and write a line for each collective."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    own = kernels()
    single = {name: alone(run, streams[1]) for name, run in own.items()}
    world = dist.get_world_size()
    for kind, sizes in _SIZES.items():
        for size in sizes:
            sent = collective(kind, size)
            moved = size * (world - 1) / world * (2 if kind is Collective.ALL_REDUCE else 1) / 1e9
            by_itself = alone(sent, streams[0])
            row: dict[str, Any] = {"collective": kind, "bytes": size, "gbs": moved / by_itself, "beside": {}}
            for name, run in own.items():
                both = together(sent, run, (by_itself, single[name]), streams)
                row["beside"][name] = {"gbs": moved / both[0], "slower": both[1] / single[name], "alone_us": single[name] * 1e6}
            row |= {"gpu": f"{world} × {torch.cuda.get_device_name()}", "torch": torch.__version__}
            if not dist.get_rank():
                with asked.file.open("a") as out:
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
                print(row, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
