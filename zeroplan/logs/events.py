"""Events: lines of a log that bear on why a run failed or crawls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class LogEventKind(StrEnum):
    """Kinds of events."""

    GPU_OOM = "gpu_oom"  # torch's caching allocator, or a CUDA library, got no memory of the GPU
    PINNED_OOM = "pinned_oom"  # the driver gave no page-locked host memory
    HOST_REFUSED = "host_refused"  # an allocation in host memory failed inside the process
    HOST_KILL = "host_kill"  # the kernel, Slurm or a container says that it killed a process for its memory
    SIGKILL = "sigkill"  # a launcher reports a process that ended by signal 9
    SHM_FULL = "shm_full"  # /dev/shm of a container is too small
    DISK_FULL = "disk_full"
    SCALE_FLOOR = "scale_floor"  # fp16: the loss scale cannot fall further
    OVERFLOW = "overflow"  # fp16: a step is skipped
    NAN = "nan"  # a loss or a gradient norm is NaN or infinite
    NAN_STOPPED = "nan_stopped"  # a check of the program's own ended it at the first NaN
    STUCK = "stuck"  # a collective ran into its time limit
    PEER_GONE = "peer_gone"  # another rank closed its connection
    CACHE_FLUSH = "cache_flush"  # torch's allocator had to release its cache
    SWAP = "swap"
    BATCH_SIZES = "batch_sizes"  # DeepSpeed refuses a ds_config
    ZERO_LOSS = "zero_loss"  # the loss fell to exactly 0 and stays
    DEVICE_ASSERT = "device_assert"  # a kernel refused its input, mostly an index out of range
    HARDWARE = "hardware"  # the driver reports a broken or lost GPU
    STOPPED = "stopped"  # the scheduler or a user ended the run
    CRASH = "crash"  # a process died of a signal of its own: segmentation fault, abort
    CHILD_FAILED = "child_failed"  # a launcher reports a process that ended with an error
    EXCEPTION = "exception"  # any other exception of Python
    FINISHED = "finished"  # the run says that it has ended


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One line that matters.

    Attributes:
        kind: what it reports.
        line: its number in the log, from 1.
        text: the line, shortened.
        rank: of the process that wrote it, where the line says so.
        gpu: that torch's message names.
        sizes: bytes by name: ``tried``, ``total``, ``free``, ``allowed``, ``in_use``, ``allocated``, ``cached``
            (reserved by torch and not allocated), ``resident``.
        frames: the functions of the traceback above it, as ``file:function``, outermost first.
    """

    kind: LogEventKind
    line: int
    text: str
    rank: int | None = None
    gpu: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    frames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stated:
    """Settings of the run that its log states: each is None where no line does.

    `micro_batch` samples a GPU and pass, `grad_accum` passes a step, `world_size` ranks, `trainable` parameters; `deepspeed` is
    the engine's version.
    """

    micro_batch: int | None = None
    grad_accum: int | None = None
    world_size: int | None = None
    trainable: int | None = None
    stage: int | None = None
    dtype: str | None = None
    deepspeed: str | None = None
