"""A process group of the whole world, of which one process runs: collectives change nothing and give the shapes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from zeroplan.capturing.hooks.imports import changes
from zeroplan.capturing.machine import World

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture


def install(capture: Capture) -> None:
    """Let ``init_process_group`` make a group of fake processes."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    own = dist.init_process_group

    def joined(*_: Any, rank: int = -1, world_size: int = -1, **__: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        capture.process_group = True
        if not capture.job.launcher and world_size > 1:  # processes that the script itself has started
            capture.job = replace(capture.job, world=World(max(0, rank), world_size, world_size))
            if world_size != capture.job.gpus:
                says = f"the script starts {world_size} processes, on {capture.job.gpus} GPUs: give --gpus {world_size}"
                capture.leave_out("ranks", "unknown", says)
        world = capture.job.world
        if world.size > 1:
            says = f"what {world.size} ranks share, gather and reduce is in no figure: it is of one rank's own allocations"
            capture.leave_out("ranks", "unknown", says)
        own("fake", rank=world.rank, world_size=world.size, store=FakeStore())

    _install_spawn(capture)
    dist.init_process_group = joined
    dist.distributed_c10d.init_process_group = joined
    home: Any = dist.distributed_c10d
    own_group = home.new_group

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **named: Any) -> Any:
        return own_group(ranks, timeout, None, None, **named)  # of the same fake processes, whatever the backend

    def put(name: str, function: Any) -> None:
        for module in (dist, home):
            setattr(module, name, function)

    put("new_group", new_group)

    class Done:
        """Finished work."""

        def wait(self, *_: Any, **__: Any) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

        def get_future(self) -> Any:
            future: Any = torch.futures.Future()
            future.set_result([])
            return future

    def work(*_: Any, async_op: bool = False, **__: Any) -> Any:
        return Done() if async_op else None

    for name in ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather",
                 "reduce_scatter", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "send", "recv",
                 "isend", "irecv", "monitored_barrier", "_all_gather_base", "_reduce_scatter_base",
                 "all_reduce_coalesced"):  # fmt: skip
        if hasattr(home, name):
            put(name, work)

    def gathered(*given: Any, async_op: bool = False, **named: Any) -> Any:
        """Give the values that this rank has as every rank's, where they are known."""
        names = ("tensor_list", "tensor"), ("output_tensor", "input_tensor")
        out, tensor = (*given, *(named[key] for pair in zip(*names, strict=True) for key in pair if key in named))[:2]
        value = capture.recorder.value_of(tensor)
        outs = out if isinstance(out, (list, tuple)) else [out]
        for one in outs:
            if value is None:
                capture.recorder.set_value(one, None)
                continue
            capture.recorder.set_value(one, value.reshape(-1).repeat(one.numel() // max(1, value.numel())).view(one.shape))
        return Done() if async_op else None

    for name in ("all_gather", "all_gather_into_tensor", "_all_gather_base"):
        if hasattr(home, name):
            put(name, gathered)

    def all_gather_object(found: list[Any], obj: Any, group: Any = None) -> None:
        found[:] = [obj] * len(found)

    def gather_object(obj: Any, found: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if found is not None:
            found[:] = [obj] * len(found)

    put("all_gather_object", all_gather_object)
    put("gather_object", gather_object)
    put("broadcast_object_list", lambda *_, **__: None)
    put("scatter_object_list", lambda out, given, *_, **__: out.__setitem__(0, given[0]))


def _install_spawn(capture: Capture) -> None:
    """Let ``torch.multiprocessing.spawn`` run the first of its processes, within this one."""
    import torch.multiprocessing as processes

    home: Any = processes
    changes(home)

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any) -> Any:
        capture.invented["spawn"] = f"torch.multiprocessing.spawn starts {nprocs} processes: the first is captured"
        fn(0, *args)
        return None if join else SimpleNamespace(join=lambda *_, **__: True, processes=[])

    home.spawn = home.start_processes = spawn
