"""What a script asks of ``torch.cuda``, answered for the GPU that is planned for."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from zeroplan.capturing import places
from zeroplan.capturing.machine import DRIVER_VERSION, PlannedCard
from zeroplan.capturing.recorder import ScriptRecorder, StoppedError
from zeroplan.capturing.replay import reserved
from zeroplan.capturing.source import user_line
from zeroplan.engines.process import CONTEXT
from zeroplan.tape.sizes import KernelDevice


class IdleStream:
    """A stream or an event, on which nothing waits."""

    stream_id = cuda_stream = device_index = device_type = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = places.gpu()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def query(self) -> bool:
        """Its work is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Return an event behind what is enqueued."""
        return event or IdleStream()

    def elapsed_time(self, _other: Any) -> float:
        """Milliseconds between two events: an invented one."""
        return 1.0

    def __enter__(self) -> IdleStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _IdleGenerator(IdleStream):
    """A GPU's own generator, from which nothing is drawn."""

    def get_state(self) -> torch.Tensor:
        """Return an invented state, as ``torch.cuda.get_rng_state`` does."""
        return torch.zeros(16, dtype=torch.uint8)

    def clone_state(self) -> _IdleGenerator:
        """Return itself, and so do others that return a generator."""
        return self

    graphsafe_get_state = clone_state

    def manual_seed(self, _seed: int) -> _IdleGenerator:
        """Take no seed."""
        return self

    def initial_seed(self) -> int:
        """Return that of a generator without one."""
        return 0

    seed = get_offset = initial_seed


def install(card: PlannedCard, gpus: int, recorder: ScriptRecorder) -> None:
    """Put the answers in place of ``torch.cuda``'s own.

    Args:
        card: the GPU.
        gpus: how many the process sees.
        recorder: knows what the script has on the GPU.
    """
    properties = SimpleNamespace(
        name=card.name, major=card.capability[0], minor=card.capability[1], total_memory=card.memory,
        multi_processor_count=card.multiprocessors, gcnArchName="", is_integrated=0, is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, warp_size=32, uuid="GPU-0",
        shared_memory_per_block_optin=232448, shared_memory_per_block=49152, shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
    )  # fmt: skip
    bf16 = card.capability >= (8, 0)

    def live(*_: Any) -> int:
        return recorder.live[0]

    def peak(*_: Any) -> int:
        return recorder.live[1]

    def cached() -> tuple[int, int]:
        return reserved(recorder.out, KernelDevice(card.multiprocessors), card.workspace, recorder.peak_since)

    def free(*_: Any) -> tuple[int, int]:
        return max(0, card.memory - CONTEXT - live()), card.memory

    def stats(*_: Any) -> dict[str, int]:
        now, most = recorder.live
        held = {
            "reserved_bytes": cached(),
            **dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), (now, most)),
        }
        found = {f"{kind}.all.{part}": both[at] for kind, both in held.items() for at, part in enumerate(("current", "peak"))}
        return collections.defaultdict(int, found)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            places.set_gpu(index)

    @contextlib.contextmanager
    def inside(*_: Any, **__: Any) -> Iterator[None]:
        yield

    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: gpus, "current_device": lambda: places.gpu().index,
        "set_device": set_device, "_lazy_init": nothing, "init": nothing, "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False, "synchronize": nothing, "empty_cache": recorder.empty_cache, "ipc_collect": nothing,
        "get_device_properties": lambda *_: properties, "get_device_capability": lambda *_: card.capability,
        "get_device_name": lambda *_: card.name, "is_bf16_supported": lambda *_, **__: bf16, "Stream": IdleStream,
        "Event": IdleStream,
        "current_stream": lambda *_: IdleStream(), "default_stream": lambda *_: IdleStream(), "stream": lambda _: inside(),
        "set_stream": nothing, "device": _Device, "device_of": lambda _: inside(), "manual_seed": nothing,
        "manual_seed_all": nothing, "seed": nothing, "seed_all": nothing, "initial_seed": lambda: 0,
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8), "set_rng_state": nothing,
        "default_generators": tuple(_IdleGenerator() for _ in range(gpus)),
        "get_rng_state_all": list, "set_rng_state_all": nothing, "memory_stats": stats,
        "memory_allocated": live, "max_memory_allocated": peak,
        "memory_reserved": lambda *_: cached()[0], "max_memory_reserved": lambda *_: cached()[1],
        "reset_peak_memory_stats": recorder.forget_peak, "reset_max_memory_allocated": recorder.forget_peak,
        "reset_accumulated_memory_stats": nothing, "set_per_process_memory_fraction": nothing, "memory_summary": lambda *_: "",
        "mem_get_info": free, "can_device_access_peer": lambda *_: True,
        "utilization": lambda *_: 0, "temperature": lambda *_: 0, "power_draw": lambda *_: 0,
        "get_arch_list": lambda: ["sm_90"],
        "is_current_stream_capturing": lambda: False, "_device_count_nvml": lambda: gpus, "cudart": lambda: IdleStream(),
        "_check_capability": nothing, "_maybe_exchange_device": lambda _: -1, "_exchange_device": lambda _: -1,
    }  # fmt: skip
    for name in ("CUDAGraph", "graph", "make_graphed_callables"):
        answers[name] = _stops("no rule knows what CUDA graphs keep: capture the script without them")
    for name in ("_record_memory_history", "_dump_snapshot", "_snapshot"):
        answers[name] = nothing
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "empty_cache",
                 "mem_get_info", "reset_peak_memory_stats", "memory_stats", "memory_summary", "_record_memory_history",
                 "_dump_snapshot", "_snapshot"):  # fmt: skip
        setattr(torch.cuda.memory, name, answers[name])
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "get_rng_state_all"):
        setattr(torch.cuda.random, name, answers[name])
    nccl: Any = torch.cuda.nccl
    nccl.version = lambda: (2, 28, 9)
    nvtx: Any = torch.cuda.nvtx
    for name in ("range_push", "range_pop", "mark"):
        setattr(nvtx, name, nothing)
    version, built, random = torch.version, torch.backends.cuda, torch.random
    for home, name, value in ((version, "cuda", "13.0"), (built, "is_built", lambda: True), (random, "fork_rng", inside)):
        setattr(home, name, value)
    if hasattr(torch, "accelerator"):
        found = {"is_available": lambda: True, "current_accelerator": lambda *_, **__: torch.device("cuda"),
                 "device_count": lambda: gpus, "current_device_index": lambda: places.gpu().index, "synchronize": nothing,
                 "set_device_index": set_device, "current_stream": lambda *_: IdleStream(), "empty_cache": recorder.empty_cache,
                 "memory_allocated": live, "max_memory_allocated": peak, "get_memory_info": free,
                 "reset_peak_memory_stats": recorder.forget_peak}  # fmt: skip
        for name, answer in found.items():
            setattr(torch.accelerator, name, answer)
    torch.Generator = _Generator  # type: ignore[misc]


def _stops(why: str) -> type:
    """A class, or a function, that stops the script where it is called."""

    def stops(*_: Any, **__: Any) -> Any:
        raise StoppedError(why, user_line())

    return type("Graph", (), {"__new__": stops})


def install_nvml(card: PlannedCard, gpus: int, recorder: ScriptRecorder, module: Any) -> None:
    """Let NVML answer for the planned GPUs, of which the first holds what the script has there; `module` is ``pynvml``."""

    def memory(handle: int, *_: Any, **__: Any) -> Any:
        used = recorder.in_use if handle == 0 else 0
        return SimpleNamespace(total=card.memory, used=used, free=card.memory - used, reserved=0)

    answers: dict[str, Any] = {
        "nvmlInit": 0, "nvmlInitWithFlags": 0, "nvmlShutdown": 0, "nvmlDeviceGetCount": gpus, "nvmlDeviceGetName": card.name,
        "nvmlSystemGetDriverVersion": DRIVER_VERSION, "nvmlSystemGetCudaDriverVersion": 13000, "nvmlDeviceGetTemperature": 40,
        "nvmlDeviceGetPowerUsage": 100_000, "nvmlDeviceGetComputeRunningProcesses": [], "nvmlDeviceGetUUID": "GPU-0",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetCudaComputeCapability": card.capability,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(module, name, lambda *_, value=value, **__: value)
    module.nvmlDeviceGetHandleByIndex, module.nvmlDeviceGetMemoryInfo = int, memory


class _Device:
    """``with torch.cuda.device(…)``."""

    def __init__(self, device: Any = None) -> None:
        self.idx = device

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Generator(torch.Generator):
    """A generator on any device, kept on the host."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator("cpu")
