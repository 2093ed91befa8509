"""Diagnosis of a log: one cause, with the lines that show it and what to do first.

Note [Which event is the cause]
    When one rank dies, the others say so, too: their collectives time out, their connections close, the launcher ends them
    with SIGTERM. So what a rank says of its peers is a cause only if no rank says anything of itself. Memory comes before all
    else, since its message is exact: the GPU's, then the host's. A process that ended by signal 9 without a message of its own
    was most likely killed by the kernel for the host's memory. A NaN that stays comes before slow steps.

    What a broken GPU or a kernel's assertion leaves behind reads like other errors, so both come first; a scheduler that ends
    the run kills by signal 9, so its line comes before that. What launchers report of a process's end (an exit code, a signal)
    counts only where nothing says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from zeroplan.core.sizes import GIB, format_bytes
from zeroplan.logs.events import LogEvent, LogEventKind, Stated
from zeroplan.logs.phases import phase_of
from zeroplan.logs.reader import Log


class Cause(StrEnum):
    """Causes for which a run fails or crawls."""

    GPU_MEMORY = "gpu_memory"
    GPU_FRAGMENTATION = "gpu_fragmentation"
    GPU_SHARED = "gpu_shared"
    HOST_MEMORY = "host_memory"
    PINNED_MEMORY = "pinned_memory"
    SHARED_MEMORY = "shared_memory"
    DISK = "disk"
    LOSS_SCALE = "loss_scale"
    NOT_A_NUMBER = "not_a_number"
    BATCH_SIZES = "batch_sizes"
    DEVICE_ASSERT = "device_assert"
    HARDWARE = "hardware"
    STOPPED = "stopped"
    CRASH = "crash"
    STUCK_COLLECTIVE = "stuck_collective"
    LOST_RANK = "lost_rank"
    OTHER_ERROR = "other_error"
    MEMORY_PRESSURE = "memory_pressure"
    SLOWER = "slower"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Advice:
    """An action, and why it helps. `flags` is its name in zeroplan's commands, where it has one."""

    what: str
    why: str
    flags: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause that a log shows, its evidence and the advice.

    Attributes:
        cause: the cause.
        verdict: one sentence.
        phase: of the training step, as the traceback shows it.
        rank: that failed first.
        evidence: the lines that show it.
        sizes: bytes that the decisive line names (see :class:`~zeroplan.logs.events.LogEvent`).
        advice: what to do, the first thing first.
        stated: sizes of the run that the log gives.
    """

    cause: Cause
    verdict: str
    phase: str | None = None
    rank: int | None = None
    evidence: tuple[LogEvent, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    advice: tuple[Advice, ...] = ()
    stated: Stated = field(default_factory=Stated)

    @property
    def failed(self) -> bool:
        """Whether the run died, or trained on numbers that are none."""
        return self.cause not in (Cause.NOTHING, Cause.SLOWER, Cause.MEMORY_PRESSURE)

    @property
    def about_gpu_memory(self) -> bool:
        """Whether a plan of the run's GPU memory would tell more."""
        return self.cause in (Cause.GPU_MEMORY, Cause.GPU_FRAGMENTATION, Cause.GPU_SHARED, Cause.MEMORY_PRESSURE)


#: Memory outside this process' share that is worth naming, and the least part of a GPU that fragmentation must hold.
_OTHERS, _FRAGMENTED = GIB, 0.05
#: Steps skipped in a row until the loss scale has settled, which is normal in fp16, and NaN lines that are no accident.
_SETTLING, _PERSISTENT = 20, 3
#: A step that takes so much longer than at first is worth naming.
_SLOWER = 1.5

_EXPANDABLE = Advice(
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "the allocator holds memory in pieces that are too small; expandable segments grow in place",
    "--alloc-conf expandable_segments:True",
)
_SHARD_ALL = Advice("shard more: ZeRO-3", "it gathers parameters twice a step", "--stage 3")
#: In the order of what they cost in speed.
_TUNING = (
    Advice("shard more: ZeRO-2, then ZeRO-3", "stage 2 costs no speed; stage 3 gathers parameters twice a step", "--stage 2"),
    Advice(
        "switch gradient checkpointing on",
        "blocks keep their inputs only, for about a third more computation",
        "--gradient-checkpointing",
    ),
    Advice(
        "halve the micro batch and double the accumulation",
        "activations and logits halve, the step sees the same samples",
        "--micro-batch",
    ),
    Advice(
        "offload the optimizer to the host",
        "the last resort: copies and the CPU's Adam slow every step",
        "--offload-optimizer cpu",
    ),
)


_FREE_THE_GPU = Advice("free the GPU first", "nvidia-smi names the processes that hold it, often workers of a run that died")
#: What helps in one phase of a run alone.
_PHASE_ADVICE = {
    "the loss": (Advice("use a fused cross entropy", "logits of all tokens times the vocabulary are not kept whole then"),),
    "evaluation": (
        Advice(
            "lower per_device_eval_batch_size, or set prediction_loss_only or eval_accumulation_steps",
            "the Trainer keeps logits on the GPU",
        ),
    ),
    "saving a checkpoint": (Advice("save sharded", "a full state dict gathers all parameters on one GPU"),),
    "loading the model": (
        Advice("build the model under zero.Init, on the meta device or on the host", "each rank makes the whole model first"),
    ),
}
_PHASE_ADVICE["initialisation"] = _PHASE_ADVICE["loading the model"]


def diagnose(log: Log, *, stage: int | None = None) -> Diagnosis:
    """The cause of what a log shows. See Note [Which event is the cause].

    Args:
        log: what a run printed.
        stage: of the run, where somebody says it; None for what the log states.
    """
    run = log if stage is None else replace(log, stated=replace(log.stated, stage=stage))
    for judge in _JUDGES:
        found = judge(run)
        if found is not None:
            return replace(found, stated=log.stated)
    return _nothing(log)


def _gpu(log: Log) -> Diagnosis | None:
    events = log.of(LogEventKind.GPU_OOM)
    if not events:
        return None
    first = next((event for event in events if event.sizes), events[0])
    sizes = dict(first.sizes)
    phase = phase_of(first.frames) or next((p for event in events if (p := phase_of(event.frames))), None)
    cached, tried = sizes.get("cached", 0), sizes.get("tried", 0)
    total = sizes.get("allowed") or sizes.get("total")
    who = f"rank {first.rank}" if first.rank is not None else "a GPU" if first.gpu is None else f"GPU {first.gpu}"
    verdict = f"Out of GPU memory on {who}{f' in {phase}' if phase else ''}"
    if "NOT_INITIALIZED" in first.text:
        verdict = "Most likely out of GPU memory: a CUDA library found none for its handle."
    if tried:
        verdict += f": {format_bytes(tried)} more did not fit"
        if sizes.get("allowed"):
            held = sizes.get("allocated", 0) + cached
            verdict += f" beside {format_bytes(held)} of {format_bytes(sizes['allowed'])} that torch may have"
        elif sizes.get("in_use") and total:
            verdict += f" beside {format_bytes(sizes['in_use'])} of {format_bytes(total)}"
    cause, advice = Cause.GPU_MEMORY, (*_PHASE_ADVICE.get(phase or "", ()), *_tuning(log.stated))
    if (others := _others(sizes)) > _OTHERS:
        cause, advice = Cause.GPU_SHARED, (_FREE_THE_GPU, *_tuning(log.stated))
        verdict += f"; other processes hold {format_bytes(others)} of it"
    elif tried and total and cached >= tried and cached > _FRAGMENTED * total:
        cause, advice = Cause.GPU_FRAGMENTATION, (_EXPANDABLE, *_tuning(log.stated))
        verdict += f", while torch holds {format_bytes(cached)} in pieces too small"
    return Diagnosis(cause, f"{verdict}.", phase, first.rank, tuple(events[:3]), sizes, advice, log.stated)


def _others(sizes: dict[str, int]) -> int:
    """Bytes of the GPU that are neither free nor this process's; 0 where the process may have a part of the GPU only."""
    if "others" in sizes:
        return sizes["others"]
    if "allowed" in sizes or not all(name in sizes for name in ("total", "free", "in_use")):
        return 0
    return max(0, sizes["total"] - sizes["free"] - sizes["in_use"])


def _tuning(stated: Stated) -> tuple[Advice, ...]:
    """The knobs in the order of what they cost, without those that the run has: one rank and stage 3 can shard no more."""
    first = () if stated.world_size == 1 or stated.stage == 3 else (_SHARD_ALL,) if stated.stage == 2 else _TUNING[:1]
    return (*first, *_TUNING[1:])


def _host(log: Log) -> Diagnosis | None:
    own = log.of(LogEventKind.HOST_KILL, LogEventKind.HOST_REFUSED)
    killed = log.of(LogEventKind.SIGKILL)
    if not own and not (killed and not _own_errors(log)):
        return None
    events = own or killed
    sizes = next((dict(event.sizes) for event in events if event.sizes), {})
    phase = next((p for event in events if (p := phase_of(event.frames))), None)
    if own:
        held = f", with {format_bytes(sizes['resident'])} resident" if "resident" in sizes else ""
        tried = f": {format_bytes(sizes['tried'])} more were refused" if "tried" in sizes else ""
        what = "the system killed a process" if own[0].kind is LogEventKind.HOST_KILL else "an allocation failed"
        verdict = f"Out of host memory: {what}{held}{tried}."
        if all("new thread" in event.text for event in own):
            verdict = "The system refused a thread: no memory for its stack, or a limit on processes (ulimit -u, pids.max)."
    else:
        verdict = "A process was killed by signal 9: most likely the host ran out of memory (dmesg says so, if it was)."
    advice = (
        Advice("give the host more memory, or a container a higher limit", "offload wants 2 to 4 times the model's bytes"),
        Advice(
            "offload less: the optimizer, not the parameters, or nothing",
            "states live in host memory otherwise",
            "--offload-param none",
        ),
        Advice("load the weights once: low_cpu_mem_usage, zero.Init, safetensors", "each rank reads a whole copy otherwise"),
        Advice("lower the data loader's workers and pinned buffers", "each worker is a process of its own"),
    )
    return Diagnosis(Cause.HOST_MEMORY, verdict, phase, events[0].rank, tuple([*own, *killed][:3]), sizes, advice, log.stated)


def _own_errors(log: Log) -> list[LogEvent]:
    """Exceptions that are about the process itself, not about a peer that went away."""
    return log.of(LogEventKind.EXCEPTION, LogEventKind.SCALE_FLOOR, LogEventKind.BATCH_SIZES)


def _simple(kind: LogEventKind, cause: Cause, verdict: str, *advice: Advice) -> Callable[[Log], Diagnosis | None]:
    def judge(log: Log) -> Diagnosis | None:
        events = log.of(kind)
        if not events:
            return None
        first = events[0]
        return Diagnosis(
            cause, verdict, phase_of(first.frames), first.rank, tuple(events[:3]), dict(first.sizes), advice, log.stated
        )

    return judge


_BF16 = Advice(
    "train in bf16, or in fp32", "fp16 overflows above 65,504; a model pre-trained in bf16 has values beyond it", "--dtype bf16"
)
_LOWER = Advice(
    "lower the learning rate, warm up longer, clip gradients to 1.0",
    "a step that is too long leaves the model where losses explode",
)


def _nan(log: Log) -> Diagnosis | None:
    events, zeros, stopped = log.of(LogEventKind.NAN), log.of(LogEventKind.ZERO_LOSS), log.of(LogEventKind.NAN_STOPPED)
    at_end = any("loss" in event.text.lower() and event.line > log.last_finite for event in events[-1:])
    persistent = len(events) >= _PERSISTENT or at_end
    if not persistent and not zeros and not stopped:
        return None
    half = log.stated.dtype == "fp16" or log.of(LogEventKind.OVERFLOW)
    what = "Losses or gradients are NaN or infinite" if persistent else "The loss is exactly 0, as of NaN gradients,"
    events = stopped or (events if persistent else zeros)
    verdict = f"{what} from line {events[0].line} on: the run trains on nothing since."
    if stopped:
        verdict = f"A loss or a gradient is NaN or infinite, and a check ended the run there (line {events[0].line})."
    advice = (
        (_BF16, _LOWER)
        if half
        else (_LOWER, Advice("look at the batch before the first NaN", "empty labels or a bad sample give 0 / 0"))
    )
    return Diagnosis(Cause.NOT_A_NUMBER, verdict, None, events[0].rank, tuple(events[:2]), {}, advice, log.stated)


def _overflow(log: Log) -> Diagnosis | None:
    events = log.of(LogEventKind.OVERFLOW)
    if len(events) <= _SETTLING:
        return None
    verdict = (
        f"fp16 overflows again and again: {len(events)} steps or more were skipped, not only while the loss scale settles."
    )
    return Diagnosis(Cause.LOSS_SCALE, verdict, None, None, tuple(events[:2]), {}, (_BF16, _LOWER), log.stated)


def _stopped(log: Log) -> Diagnosis | None:
    """A run that was ended from outside; a rank that failed first makes schedulers end the others."""
    events = log.of(LogEventKind.STOPPED)
    failed = log.of(
        LogEventKind.HOST_KILL,
        LogEventKind.HOST_REFUSED,
        LogEventKind.EXCEPTION,
        LogEventKind.CRASH,
        LogEventKind.CHILD_FAILED,
        LogEventKind.STUCK,
    )
    if not events or any(event.line < events[0].line for event in failed):
        return None
    limit = next((event for event in events if "DUE TO" in event.text), events[0])
    verdict = "The run was stopped from outside, by its scheduler or a user: nothing in it failed."
    advice = Advice("save checkpoints often enough to go on from", "schedulers warn some seconds before, or not at all")
    return Diagnosis(Cause.STOPPED, verdict, None, limit.rank, (limit,), {}, (advice,), log.stated)


def _crash(log: Log) -> Diagnosis | None:
    events = log.of(LogEventKind.CRASH)
    if not events:
        return None
    verdict = "A process crashed in native code (segmentation fault, abort), and no message says why: no sign of memory."
    advice = (
        Advice("run with python -X faulthandler", "it prints where in Python each thread stood"),
        Advice("compare the versions of torch, CUDA, NCCL and compiled extensions", "builds that do not fit crash so"),
    )
    return Diagnosis(Cause.CRASH, verdict, None, events[0].rank, tuple(events[:3]), {}, advice, log.stated)


def _ended(log: Log) -> Diagnosis | None:
    """Report a process that ended with an error in the launcher's words, where nothing else says more."""
    events = log.of(LogEventKind.CHILD_FAILED)
    if not events:
        return None
    verdict = "A process ended with an error, and this log does not say which: its own output has the cause."
    read = Advice("read the output of that rank", "torchrun --log-dir DIR --tee 3 keeps one a rank")
    kernel = Advice(
        "look for a kill line of the kernel (dmesg)", "short of memory, it ends a process without a word in this log"
    )
    return Diagnosis(Cause.LOST_RANK, verdict, None, events[0].rank, tuple(events[:3]), {}, (read, kernel), log.stated)


def _error(log: Log) -> Diagnosis | None:
    events, done = log.of(LogEventKind.EXCEPTION), log.of(LogEventKind.FINISHED)
    if not events or (
        done
        and done[-1].line > events[-1].line
        and not log.of(LogEventKind.CHILD_FAILED, LogEventKind.CRASH, LogEventKind.SIGKILL)
    ):
        return None  # none, or the run went on and came to its end
    first = events[0]
    advice = (Advice("read the traceback above that line", "the fault lies in the program or its settings, and in no memory"),)
    verdict = f"No fault of memory: the run ended with {first.text}"
    return Diagnosis(Cause.OTHER_ERROR, verdict, phase_of(first.frames), first.rank, (first,), {}, advice, log.stated)


def _stuck(log: Log) -> Diagnosis | None:
    stuck = log.of(LogEventKind.STUCK)
    if stuck:
        ranks = sorted({event.rank for event in stuck if event.rank is not None})
        who = f" ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:8]))} waited)" if ranks else ""
        verdict = f"Ranks waited for another one until a collective's time limit{who}: look at the rank that did not come."
        advice = (
            Advice(
                "compare where each rank stands (py-spy dump, TORCH_NCCL_TRACE_BUFFER_SIZE)",
                "a rank that skips a branch, has another number of batches or saves alone never comes",
            ),
            Advice(
                "raise the time limit only for work that takes so long, such as tokenising on rank 0",
                "ddp_timeout, init_process_group(timeout=…)",
            ),
        )
        return Diagnosis(
            Cause.STUCK_COLLECTIVE, verdict, None, ranks[0] if ranks else None, tuple(stuck[:3]), {}, advice, log.stated
        )
    return None


def _peers(log: Log) -> Diagnosis | None:
    gone = log.of(LogEventKind.PEER_GONE)
    if gone:
        verdict = "Another rank went away first, and this log does not say why: its own log has the cause."
        read = Advice("read the log of the other ranks and nodes", "torchrun --log-dir DIR --tee 3 keeps one a rank")
        return Diagnosis(Cause.LOST_RANK, verdict, None, gone[0].rank, tuple(gone[:3]), {}, (read,), log.stated)
    return None


def _pressure(log: Log) -> Diagnosis | None:
    flushes, swap = log.of(LogEventKind.CACHE_FLUSH), log.of(LogEventKind.SWAP)
    if flushes:
        verdict = "The GPU's memory is full: torch's allocator releases and takes memory in every step, which makes steps slow."
        return Diagnosis(
            Cause.MEMORY_PRESSURE,
            verdict,
            None,
            flushes[0].rank,
            tuple(flushes[:2]),
            {},
            (_EXPANDABLE, *_tuning(log.stated)),
            log.stated,
        )
    if swap:
        less = Advice("offload less, or give the host more memory", "memory that is swapped out is a hundred times slower")
        return Diagnosis(Cause.MEMORY_PRESSURE, "The host swaps.", None, None, tuple(swap[:2]), {}, (less,), log.stated)
    return None


def _slower(log: Log) -> Diagnosis | None:
    factor = log.slowdown
    if factor is None or factor < _SLOWER:
        return None
    advice = Advice(
        "look whether sequences grow, the GPU clocks down, or the data loader falls behind", "memory does not show in this log"
    )
    return Diagnosis(
        Cause.SLOWER,
        f"Steps take {factor:.1f} times as long at the end as at first.",
        None,
        None,
        (),
        {},
        (advice,),
        log.stated,
    )


def _nothing(log: Log) -> Diagnosis:
    done = log.of(LogEventKind.FINISHED)
    if done:
        return Diagnosis(Cause.NOTHING, "Nothing went wrong: the run ended by itself.", evidence=(done[-1],), stated=log.stated)
    return Diagnosis(Cause.NOTHING, "Nothing in this log says that anything went wrong.", stated=log.stated)


#: Each cause's judge, the one that decides first.
_JUDGES: tuple[Callable[[Log], Diagnosis | None], ...] = (
    _simple(
        LogEventKind.HARDWARE,
        Cause.HARDWARE,
        "A GPU is broken or lost, as its driver says: no fault of the run.",
        Advice("leave that GPU or node out, and have it reset or looked at", "nvidia-smi -q and dmesg name it"),
    ),
    _simple(
        LogEventKind.DEVICE_ASSERT,
        Cause.DEVICE_ASSERT,
        "A kernel refused its input, mostly an index out of range: a token or label beyond the table. No fault of memory.",
        Advice(
            "compare the largest token with vocab_size, labels with num_labels", "tokenizer and model may not belong together"
        ),
        Advice("run once with CUDA_LAUNCH_BLOCKING=1, or on the CPU", "the traceback then points at the operation"),
    ),
    _gpu,
    _simple(
        LogEventKind.PINNED_OOM,
        Cause.PINNED_MEMORY,
        "Out of page-locked host memory.",
        Advice("set pin_memory to false, or raise the limit (ulimit -l)", "pinned memory cannot be swapped out and is bounded"),
    ),
    _simple(
        LogEventKind.SHM_FULL,
        Cause.SHARED_MEMORY,
        "/dev/shm is full: data loaders and NCCL exchange through it.",
        Advice("start the container with --ipc=host or --shm-size 16g", "containers get 64 MiB"),
    ),
    _simple(
        LogEventKind.DISK_FULL,
        Cause.DISK,
        "A file could not be written: the disk is full, or a limit of its size is reached.",
        Advice(
            "free it (df -h, df -i, quota, ulimit -f), or write elsewhere",
            "a checkpoint holds the weights and, for AdamW, 12 bytes a parameter",
        ),
    ),
    _stopped,
    _host,
    _simple(
        LogEventKind.SCALE_FLOOR,
        Cause.LOSS_SCALE,
        "fp16: the loss scale fell to its minimum, every step overflowed.",
        _BF16,
        _LOWER,
    ),
    _simple(
        LogEventKind.BATCH_SIZES,
        Cause.BATCH_SIZES,
        "DeepSpeed refused the batch sizes: train_batch_size is not micro batch × accumulation × data-parallel ranks.",
        Advice("leave train_batch_size out, or correct one of the three", "zeroplan check FILE says which"),
    ),
    _nan,
    _error,
    _overflow,
    _stuck,
    _crash,
    _peers,
    _ended,
    _pressure,
    _slower,
)
