"""The kernels of 1-bit Adam on one GPU: their bandwidth beside a plain copy, and what a step sends beside a 16-bit all-reduce.

    python -m benchmarks.kernels.one_bit [--numel 400000000] [--ranks 8] [--out FOLDER]

The passes are those of one rank among `--ranks`: it packs its momentum for all, averages what it received for its part,
unpacks the mean, and steps; beside them AdamW's one pass. What the exchange saves of an all-reduce, divided by what the passes
cost more than AdamW, is the link below which it can pay; it is printed, in GB/s a GPU, and says nothing of latency or of what
an all-reduce hides under the backward.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.measure import Contender, machine, race, save, show
from zeroplan.core.arena.layout import align
from zeroplan.core.one_bit import message_words
from zeroplan_runtime import kernels
from zeroplan_runtime.kernels import backends, cuda_backend, one_bit, torch_backend

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Rank:
    """One rank's tensors for `numel` elements among `ranks` ranks, the same on every device."""

    def __init__(self, numel: int, ranks: int, device: torch.device) -> None:
        self.ranks, self.shard = ranks, align(-(-numel // ranks))
        count = self.shard * ranks
        make = torch.Generator(device).manual_seed(0)
        self.param, self.momentum, self.error = (torch.randn(count, device=device, generator=make) for _ in range(3))
        self.second = torch.rand(count, device=device, generator=make)
        self.grad = torch.randn(count, device=device, generator=make).bfloat16()
        self.out = torch.empty(count, dtype=torch.bfloat16, device=device)
        self.server = torch.zeros(self.shard, device=device)
        self.sent = torch.zeros(ranks * message_words(self.shard), device=device)

    def pack(self) -> None:
        """Compresses momentum and gradient for all ranks."""
        kernels.sign_pack(self.momentum, self.grad, self.error, self.sent, ranks=self.ranks, beta1=0.9)

    def average(self) -> None:
        """Averages the messages; they are this rank's own, which costs the same."""
        mine = self.sent[: message_words(self.shard)]
        kernels.sign_average(self.sent, self.server, mine, ranks=self.ranks)

    def unpack(self) -> None:
        """Writes the mean to the momentum."""
        kernels.sign_unpack(self.sent, self.momentum, ranks=self.ranks)

    def frozen(self) -> None:
        """Steps with the second moment that stays."""
        kernels.frozen_adam(self.param, self.momentum, self.second, step=9, second_step=5, param_out=self.out, **HYPER)

    def adamw(self) -> None:
        """Steps AdamW."""
        kernels.adamw(self.param, self.grad, self.momentum, self.second, step=9, param_out=self.out, **HYPER)


def check(device: torch.device) -> None:
    """The kernels' bits are the torch path's."""
    made = []
    for path in (cuda_backend, torch_backend):
        vars(one_bit)["backend"] = lambda _device, path=path: path
        rank = Rank(1_000_000, 3, device)
        for call in (rank.pack, rank.average, rank.unpack, rank.frozen):
            call()
        made.append((rank.sent, rank.error, rank.server, rank.momentum, rank.param, rank.out))
    vars(one_bit)["backend"] = backends.backend
    # As whole numbers: packed signs read as floats can be NaN, which equals nothing.
    as_bits = ([one.view(torch.int16 if one.itemsize == 2 else torch.int32) for one in path] for path in made)
    assert all(torch.equal(a, b) for a, b in zip(*as_bits, strict=True)), "kernel and torch path differ"


def main() -> None:
    """Checks, times and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=400_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if fault := backends.cuda_fault(0):
        print(f"the kernels do not run here: {fault}")
        raise SystemExit(2)
    device = torch.device("cuda", 0)
    check(device)
    rank = Rank(given.numel, given.ranks, device)
    count, messages = rank.param.numel(), 4 * rank.sent.numel()
    source = torch.empty(7 * count // 4, device=device)  # as many bytes as packing moves: 14 an element
    target = torch.empty_like(source)
    contenders: dict[str, Contender] = {
        "copy": (lambda: target.copy_(source), 14.0 * count),
        "pack": (rank.pack, 14.0 * count + messages),
        "average": (rank.average, 8.0 * rank.shard + messages + messages / given.ranks),
        "unpack": (rank.unpack, 4.0 * count + messages),
        "frozen Adam": (rank.frozen, 18.0 * count),
        "AdamW": (rank.adamw, 28.0 * count),
    }
    rows = race(contenders, device)
    show(f"1-bit Adam, {count / 1e6:.0f} M elements of {given.ranks} ranks", rows, "copy")
    spent = {name: row["ms"] / 1e3 for name, row in rows.items()}
    passes = sum(spent[name] for name in ("pack", "average", "unpack", "frozen Adam"))
    others = given.ranks - 1
    usual, exchanged = 2 * others / given.ranks * 2 * count, 2 * others / given.ranks * messages
    print(f"sent a step: {exchanged / 1e6:.1f} MB; by a 16-bit all-reduce {usual / exchanged:.2f} times as much")
    print(f"kernels: {1e3 * passes:.3f} ms, AdamW {1e3 * spent['AdamW']:.3f} ms: {passes / spent['AdamW']:.2f} times as long")
    extra = passes - spent["AdamW"]
    print(
        f"the exchange can pay below {(usual - exchanged) / extra / 1e9:.1f} GB/s a GPU" if extra > 0 else "it always can pay"
    )
    result = {"machine": machine(device), "numel": count, "ranks": given.ranks, "rows": rows}
    save("kernels_one_bit", {**result, "sent_bytes": exchanged, "all_reduce_bytes": usual}, given.out)


if __name__ == "__main__":
    main()
