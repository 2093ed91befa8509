"""Measures what this machine attains, in the fields of :class:`zeroplan.core.rates.Rates`, and keeps it as a profile.

Every figure is the best of a few repetitions, since whatever else runs can only slow one down. What the machine does not have
is left out and keeps its default. Needs torch; takes well under a minute.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import write_atomic
from zeroplan.core.rates import deepspeed_hooks, profile_path, read_profile
from zeroplan.core.sizes import MIB
from zeroplan.search.calibrate_host import measure_host
from zeroplan.search.machine import Machine

_REPEATS = 5
_FILE_BYTES = 256 * MIB
#: Elements of 16 bits a rank, and how many collectives are issued one behind the other, which hides their launch.
_LINK_SIZES, _LINK_CALLS = (1 << 20, 1 << 23, 1 << 26), 10


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured rates: `rates` with one process, and the host's rates with `ranks` at the same time (`together`).

    `together` is empty where there are fewer than two GPUs, and `note` says so.
    """

    rates: dict[str, float]
    ranks: int = 1
    together: dict[str, float] = field(default_factory=dict)
    note: str = ""


def calibrate(machine: Machine, folder: str, report: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measure the rates that this machine allows to measure.

    Args:
        machine: what :func:`zeroplan.search.machine.look` found.
        folder: where the disk is measured.
        report: told what is being measured.

    Raises:
        BadInput: without torch.
    """
    try:
        import torch
    except ImportError:
        raise BadInput("needs torch", where="--calibrate", remedy="pip install zeroplan[torch]") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    together: dict[str, float] = {}
    report("host: memory")
    found = _host_memory(torch)
    report("host: Adam")
    found["cpu_adam_gbs"] = _cpu_adam(torch)
    report("disk")
    found |= _disk(folder)
    if count:
        report("host: issuing kernels")
        found |= measure_host(1, "cuda")
        found |= deepspeed_hooks(found["launch_us"])
        report("GPU: products, copies, transfers")
        found |= _gpu(torch)
    if count > 1:
        report("links between GPUs")
        found |= _links(torch)
        report(f"host with {count} processes at once, one a GPU")
        together = measure_host(count, "cuda")
        together = _rounded(together | deepspeed_hooks(together["launch_us"]))
    note = "" if count > 1 else f"{'one GPU' if count else 'no GPU'}: nothing is measured with several processes at once"
    return Calibration(_rounded(found), max(count, 1), together, note)


def _rounded(rates: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in rates.items()}


def earlier_rates(path: str | os.PathLike[str] | None = None) -> dict[str, float]:
    """Return the rates of the profile at a place, by default the user's own; none without one."""
    target = os.fspath(path or profile_path())
    return dict(read_profile(target)["rates"]) if os.path.exists(target) else {}


def store(found: Calibration, machine: Machine, path: str | os.PathLike[str] | None = None) -> str:
    """Write the profile, by default where the search looks for it; returns the path.

    Raises:
        BadInput: when the place cannot be written.
    """
    target = os.fspath(path or profile_path())
    try:
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot be made ({error.strerror})", where=os.path.dirname(target)) from None
    gpu = machine.cards[0].preset if machine.cards else ""
    profile = {"schema": 1, "gpu": gpu, "cores": machine.cores, "packages": machine.packages, "rates": found.rates}
    if found.together:
        profile["together"] = {"ranks": found.ranks, "rates": found.together}
    write_atomic(target, json.dumps(profile, indent=2) + "\n")
    return target


def _best(run: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Time a run; returns the seconds of the fastest, after one that warms up."""
    run()
    fastest = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - begin)
    return fastest


def _host_memory(torch: Any) -> dict[str, float]:
    size = 32 * MIB
    values = torch.ones(size, dtype=torch.float32)
    scaled = _best(lambda: values.mul_(1.0))
    cast = _best(lambda: values.to(torch.bfloat16))
    return {"dram_gbs": 8 * size / scaled / 1e9, "fresh_gbs": 2 * size / cast / 1e9}


def _cpu_adam(torch: Any) -> float:
    """Return the rate of 28 bytes an element: gradient, master and two moments read, all but the gradient written."""
    count = 16 * MIB
    master, first, second = (torch.zeros(count) for _ in range(3))
    grad = torch.ones(count)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameter = torch.nn.Parameter(master)
        parameter.grad = grad
        optimizer = DeepSpeedCPUAdam([parameter])
        return 28 * count / _best(optimizer.step) / 1e9
    except Exception:  # its op needs a compiler; the runtime's own kernel does the same work
        from zeroplan_runtime.kernels import adamw

        def step() -> None:
            adamw(master, grad, first, second, step=2, lr=1e-5)

        return 28 * count / _best(step) / 1e9


def _disk(folder: str) -> dict[str, float]:
    """Measure the disk: a file is written and synced, then read past the page cache where the system drops it on request."""
    blob = os.urandom(MIB) * (_FILE_BYTES // MIB)
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            begin = time.perf_counter()
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter() - begin
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            while file.read(8 * MIB):
                pass
            read = time.perf_counter() - begin
    except OSError as error:
        raise BadInput(f"cannot be written ({error.strerror})", where=folder, remedy="name a folder by --nvme-path") from None
    return {"write_gbs": _FILE_BYTES / written / 1e9, "read_gbs": _FILE_BYTES / read / 1e9}


def _gpu(torch: Any) -> dict[str, float]:
    def timed(run: Callable[[], object]) -> float:
        def whole() -> None:
            run()
            torch.cuda.synchronize()

        return _best(whole)

    found = {}
    n = 8192
    for name, dtype in (("matmul_tflops", torch.bfloat16), ("fp32_tflops", torch.float32)):
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        found[name] = 2 * n**3 / timed(lambda a=a, b=b: a @ b) / 1e12  # type: ignore[misc]
    if torch.cuda.get_device_capability() >= (8, 9):
        a, b = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device="cuda")
        product = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        found["fp8_tflops"] = 2 * n**3 / timed(product) / 1e12
    q = torch.randn(1, 16, 4096, 128, device="cuda", dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    found["attention_tflops"] = 2 * 4096 * 4096 * 16 * 128 / timed(lambda: attend(q, q, q, is_causal=True)) / 1e12
    size = 512 * MIB
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    found["hbm_gbs"] = 2 * size / timed(lambda: target.copy_(source)) / 1e9
    pinned = torch.empty(size // 2, dtype=torch.uint8, pin_memory=True)
    part = source[: size // 2]
    up = timed(lambda: part.copy_(pinned, non_blocking=True))
    down = timed(lambda: pinned.copy_(part, non_blocking=True))
    found["pinned_gbs"] = size // 2 / max(up, down) / 1e9
    plain = torch.zeros(size // 2, dtype=torch.uint8)
    found["pageable_gbs"] = size // 2 / timed(lambda: part.copy_(plain)) / 1e9
    small = torch.empty(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            small.add_(1)
    found["kernel_us"] = timed(graph.replay) / 200 * 1e6
    return found


def _links(torch: Any) -> dict[str, float]:
    """Measure all-gather and reduce-scatter at a few sizes: bandwidth from the largest, latency from the smallest."""
    count = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_link_rank, args=(count, folder), nprocs=count)
        with open(os.path.join(folder, "links.json"), encoding="utf-8") as file:
            seconds = {int(size): value for size, value in json.load(file).items()}
    small, large = min(seconds), max(seconds)
    steps = count - 1
    return {
        "link_gbs": large * steps / count / seconds[large] / 1e9,
        "collective_us": max(
            0.1, (seconds[small] - small * steps / count / (large * steps / count / seconds[large])) / steps * 1e6
        ),
    }


def _link_rank(rank: int, count: int, folder: str) -> None:
    """Run one rank: it takes the slower of both collectives at each size; rank 0 writes them down."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
    found = {}
    for size in _LINK_SIZES:
        whole = torch.empty(size * count, dtype=torch.bfloat16, device="cuda")
        part = torch.empty(size, dtype=torch.bfloat16, device="cuda")

        def gather(whole: Any = whole, part: Any = part) -> None:
            for _ in range(_LINK_CALLS):
                dist.all_gather_into_tensor(whole, part)
            torch.cuda.synchronize()

        def scatter(whole: Any = whole, part: Any = part) -> None:
            for _ in range(_LINK_CALLS):
                dist.reduce_scatter_tensor(part, whole)
            torch.cuda.synchronize()

        found[2 * size * count] = max(_best(gather), _best(scatter)) / _LINK_CALLS
    if rank == 0:
        with open(os.path.join(folder, "links.json"), "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
