"""What communicators of NCCL take of a GPU: the card's memory before and after each first collective of a process group.

``python -m benchmarks.mesh.communicators ROWS.jsonl`` on a machine with two GPUs. Plans of a total count communicators; what
one more costs depends on its ranks and on what is asked of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

#: By name, the order in which a fresh process makes its groups and calls their collectives: group, then collective.
ORDERS: dict[str, tuple[tuple[str, str], ...]] = {
    "one group": tuple(("both", what) for what in ("broadcast", "all_reduce", "all_gather", "reduce_scatter", "send")),
    "second groups": (
        ("both", "all_reduce"),
        ("other", "all_reduce"),
        ("other", "all_gather"),
        ("third", "broadcast"),
        ("third", "all_to_all"),
    ),
    "groups of one": (
        ("both", "all_reduce"),
        ("alone", "broadcast"),
        ("alone", "all_reduce"),
        ("alone again", "all_reduce"),
        ("alone again", "all_gather"),
    ),
    "alone first": (("alone", "broadcast"), ("alone", "all_reduce"), ("both", "all_reduce"), ("both", "all_gather")),
    "pairs first": (("both", "send"), ("both", "send back"), ("other", "all_reduce"), ("alone", "all_reduce")),
}
_SECONDS = 120.0
_COUNT = 1 << 20


def main() -> None:
    """Measure, and write one row an order."""
    from benchmarks.forked import failure, run_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", type=Path)
    asked = parser.parse_args()
    for name, order in ORDERS.items():
        found = run_ranks(partial(_on_rank, order), 2, timeout=_SECONDS)
        fault = failure(found)
        row: dict[str, Any] = {"id": name, "ok": fault is None}
        row |= {"ranks": [one["value"] for one in found]} if fault is None else {"fault": fault}
        with asked.rows.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(name, fault or "", flush=True)
        for what, mib in [] if fault else found[0]["value"]:
            print(f"  {what:28} {mib:9.1f} MiB")


def _on_rank(order: tuple[tuple[str, str], ...], rank: int) -> list[tuple[str, float]]:
    """Return what each step of the order added to the card's memory, in MiB, the context first."""
    import torch
    import torch.distributed as dist

    from benchmarks.measure.probe import Device

    card = Device(rank)
    device = torch.device("cuda", rank) if card.cuda else torch.device("cpu")
    steps: list[tuple[str, float]] = []
    last = card.used()

    def note(name: str) -> None:
        nonlocal last
        if card.cuda:
            torch.cuda.synchronize()
        now = card.used()
        steps.append((name, (now - last) / 2**20))
        last = now

    if card.cuda:
        torch.cuda.set_device(device)
    tensor = torch.ones(_COUNT, device=device)
    wide = torch.ones(2 * _COUNT, device=device)
    note("context and tensors")
    dist.init_process_group("nccl" if card.cuda else "gloo")
    groups: dict[str, Any] = {"both": None, "other": dist.new_group([0, 1]), "third": dist.new_group([0, 1])}
    for name in ("alone", "alone again"):
        own = [dist.new_group([0]), dist.new_group([1])]
        groups[name] = own[rank]
    note("groups")
    for group, what in order:
        _collectives(dist, tensor, wide, groups[group], rank)[what]()
        note(f"{group}: {what}")
    return steps


def _collectives(dist: Any, tensor: Any, wide: Any, group: Any, rank: int) -> dict[str, Callable[[], Any]]:
    ranks = dist.get_process_group_ranks(group) if group is not None else [0, 1]
    whole = wide[: len(ranks) * tensor.numel()]

    def send(first: int) -> None:
        if rank == first:
            dist.send(tensor, 1 - first)
        else:
            dist.recv(tensor, first)

    return {
        "broadcast": lambda: dist.broadcast(tensor, ranks[0], group=group),
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, tensor, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(tensor, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(whole.clone(), whole, group=group),
        "send": lambda: send(0),
        "send back": lambda: send(1),
    }


if __name__ == "__main__":
    main()
