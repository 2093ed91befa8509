"""Measures the host's rates with one process, and with one process a GPU at the same time, which share cores and memory.

A process alone issues kernels faster than one of four on the same host: clocks fall, caches and memory are shared, and threads
of NCCL, of autograd and of other ranks want the cores. Steps that the host bounds take as long as the slowest rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.sizes import MIB
from zeroplan.search.layout_host import LINEAR, NORM

#: Passes of the small model that are timed; the median counts, since all processes are active in the middle.
_PASSES = 40
_REPEATS = 5
#: Blocks of the small model, each with seven linear layers and two norms.
_BLOCKS = 4
#: Elements that each process casts into new memory.
_CAST = 32 * MIB
#: Seconds that the slowest process may take: it imports torch and transformers.
_PATIENCE = 300.0
#: Seconds of a forward, and of its backward.
_Timed = Callable[[Callable[[], Any]], tuple[float, float]]


def measure_host(ranks: int, device: str, passes: int = _PASSES) -> dict[str, float]:
    """Measure the host's rates with `ranks` processes at the same time, each bound to its GPU.

    Args:
        device: cuda, or cpu, where the time to issue kernels holds their computation too.
        passes: of the small model, of which the middle one counts.

    Returns:
        ``launch_us``, ``autograd_us``, ``dispatch_us``, ``unit_hook_us`` and ``fresh_gbs`` of the slowest process: fields of
        :class:`zeroplan.core.rates.Rates`.

    Raises:
        BadInput: a process that ends early or takes too long.
    """
    if ranks == 1:
        return _combined([_measure(0, 1, device, lambda: None, passes)])
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(ranks)
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=_rank, args=(rank, ranks, device, folder, barrier, passes)) for rank in range(ranks)]
        for process in started:
            process.start()
        deadline = time.monotonic() + _PATIENCE
        while any(process.is_alive() for process in started) and time.monotonic() < deadline:
            if any(process.exitcode for process in started):
                break  # the others would wait for it in vain
            time.sleep(0.05)
        failed = [rank for rank, process in enumerate(started) if process.exitcode]
        failed = failed or [rank for rank, process in enumerate(started) if process.is_alive()]
        for process in started:
            if process.is_alive():
                process.kill()
            process.join()
        if failed:
            raise BadInput(f"rank {failed[0]} of {ranks} ended early or hung", where="--calibrate", remedy="run it once more")
        found = []
        for rank in range(ranks):
            with open(os.path.join(folder, f"{rank}.json"), encoding="utf-8") as file:
                found.append(json.load(file))
    return _combined(found)


def _combined(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the slowest process's rates: times are the longest, bandwidths the least."""
    return {name: (min if name == "fresh_gbs" else max)(one[name] for one in found) for name in found[0]}


def _rank(rank: int, ranks: int, device: str, folder: str, barrier: Barrier, passes: int) -> None:
    """Measure one process; all begin each part together."""
    found = _measure(rank, ranks, device, lambda: barrier.wait(_PATIENCE), passes)
    with open(os.path.join(folder, f"{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(found, file)


def _measure(rank: int, ranks: int, device: str, meet: Callable[[], object], passes: int) -> dict[str, float]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // ranks))
    if device == "cuda":
        torch.cuda.set_device(rank)
    timed = partial(_timed, meet, passes)
    found = _launch(torch, device, timed) | _distributed(torch, device, timed)
    values = torch.ones(_CAST, dtype=torch.float32)
    meet()
    cast = _median(lambda: values.to(torch.bfloat16))
    meet()
    return found | {"fresh_gbs": 2 * _CAST / cast / 1e9}


def _median(run: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Return the seconds of the middle one of several runs, after one that warms up."""
    run()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _llama(torch: Any, device: str) -> tuple[Any, dict[str, Any]]:
    """Return a Llama that takes no time to compute, and a batch for it."""
    import transformers

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=_BLOCKS, num_key_value_heads=2, use_cache=False)
    tokens = torch.randint(0, 128, (1, 16), device=device)
    return transformers.LlamaForCausalLM(config).to(device).bfloat16().train(), {"input_ids": tokens, "labels": tokens}


def _timed(meet: Callable[[], object], passes: int, forward: Callable[[], Any]) -> tuple[float, float]:
    """Return the host's seconds of a forward and of a backward, each by itself."""
    times: list[tuple[float, float]] = []
    meet()
    for _ in range(passes + 1):  # the first warms up
        begin = time.perf_counter()
        loss = forward()
        between = time.perf_counter()
        loss.backward()
        times.append((between - begin, time.perf_counter() - between))
    first, second = zip(*times[1:], strict=True)
    return statistics.median(first), statistics.median(second)


def _launch(torch: Any, device: str, timed: _Timed) -> dict[str, float]:
    """Return the µs of host time a kernel of the forward and of the backward.

    Kernels are counted by the dispatcher as tapes count them: every operation that makes a new storage.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        kernels: int = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            known = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
            self.kernels += isinstance(out, torch.Tensor) and out.untyped_storage()._cdata not in known
            return out

    model, batch = _llama(torch, device)

    def forward() -> Any:
        return model(**batch).loss

    with Count() as first:
        loss = forward()
    with Count() as second:
        loss.backward()
    alone, behind = timed(forward)
    return {"launch_us": alone / int(first.kernels) * 1e6, "autograd_us": behind / int(second.kernels) * 1e6}


def _distributed(torch: Any, device: str, timed: _Timed) -> dict[str, float]:
    """Return the µs of host time an operation on DTensors, and of FSDP2 a parameter and pass, beside what they issue anyway.

    The other rank of both is one of torch's fake process group, whose collectives return at once.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from zeroplan.core.parallel import ParallelLayout
    from zeroplan.engines.torch_mesh import mesh_on, passes_of
    from zeroplan.trace.tensor_parallel import parallelize
    from zeroplan_runtime.units import find_blocks

    def seconds(layout: ParallelLayout | None) -> float:
        model, batch = _llama(torch, device)
        if layout is None:
            return sum(timed(lambda: model(**batch).loss))
        mesh = mesh_on(torch.device(device), {"dp": layout.dp, "tp": layout.tp})
        if layout.tp > 1:
            parallelize(model, mesh["tp"], sequence=False)
        for module in (*find_blocks(model).values(), model):
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=True)
        with passes_of(layout, None)(batch) as given:
            return sum(timed(lambda: model(**given).loss))

    plain = seconds(None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sharded, shared = (seconds(ParallelLayout(gpus=2, tp=tp)) for tp in (1, 2))
    finally:
        dist.destroy_process_group()
    parameters, operations = 9 * _BLOCKS + 3, _BLOCKS * (7 * sum(LINEAR) + 2 * sum(NORM))
    return {
        "dispatch_us": (shared - sharded) / operations * 1e6,
        "unit_hook_us": (sharded - plain) / (2 * parameters) * 1e6,
    }
