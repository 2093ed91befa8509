"""The lines by which torch, CUDA's libraries, launchers, the kernel and trainers say what happened, one pattern a form.

A pattern is searched in a line only where one of its words stands there, in lower case; all of them take time in proportion
to the line. Sources are the programs' own messages:

- torch ``c10/cuda/CUDACachingAllocator.cpp`` (1.x and 2.0; 2.1 and later), ``c10/core/impl/alloc_cpu.cpp``,
  ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp``, ``torch/distributed/elastic``;
- DeepSpeed ``runtime/fp16/loss_scaler.py``, ``runtime/zero/stage3.py``, ``launcher/launch.py``, ``runtime/config.py``;
- Linux ``mm/oom_kill.c``, Slurm, Docker and Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from zeroplan.logs.events import LogEventKind

#: DeepSpeed's version, as its start and ``ds_report`` print it.
DEEPSPEED_SAID = re.compile(
    r"DeepSpeed info: version=(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)|^deepspeed info \.+ (\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)",
    re.MULTILINE,
)
_UNITS = {"bytes": 1, "b": 1, "kb": 1 << 10, "kib": 1 << 10, "mib": 1 << 20, "mb": 1 << 20, "gib": 1 << 30, "gb": 1 << 30}
_UNITS |= {"tib": 1 << 40, "tb": 1 << 40}
_SIZE = r"([\d.]+) ?([kKMGT]i?B|bytes)"


@dataclass(frozen=True, slots=True)
class LogPattern:
    """`regex` says the kind; `words` are searched first."""

    kind: LogEventKind
    words: tuple[str, ...]
    regex: re.Pattern[str]


def _pattern(kind: LogEventKind, words: str, regex: str) -> LogPattern:
    return LogPattern(kind, tuple(words.split("|")), re.compile(regex, re.IGNORECASE))


#: In the order in which they are tried: the first that matches says what the line is.
PATTERNS = (
    _pattern(
        LogEventKind.HARDWARE,
        "xid|fallen off|uncorrectable|device handle",
        r"Xid \(.{0,40}\): (?:48|6[234]|74|79|9[245]|119|120)\b|fallen off the bus|uncorrectable (?:NVLink |ECC )?error"
        r"|Unable to determine the device handle",
    ),
    _pattern(
        LogEventKind.DEVICE_ASSERT,
        "assert",
        r"device-side assert triggered|block: \[[\d,]+\], thread: \[[\d,]+\] Assertion",
    ),
    # What a torn broadcast of an object's size asks for: the other rank is what went wrong.
    _pattern(LogEventKind.PEER_GONE, "more than 1eb", r"Tried to allocate more than 1EB memory"),
    _pattern(
        LogEventKind.PINNED_OOM,
        "pin_memory|pinned|cudahostalloc",
        r"(?:cudaHostAlloc|pin_memory|pinned).{0,80}(?:out of memory|failed)",
    ),
    _pattern(
        LogEventKind.GPU_OOM,
        "out of memory|alloc_failed|not_initialized|cuda calloc",
        r"(?:CUDA|HIP|XPU|MPS backend)(?: error:)? out of memory|OutOfMemoryError|_STATUS_ALLOC_FAILED"
        r"|Cuda failure.{0,20}out of memory|\[CUDA\]: out of memory|Failed to CUDA calloc"
        r"|CU(?:BLAS|DNN)_STATUS_NOT_INITIALIZED",
    ),
    _pattern(
        LogEventKind.HOST_KILL,
        "killed process|oom-kill|oom_kill|oomkilled|out_of_memory|memory limit|low on|by signal: killed|: out of memory",
        r"Killed process \d+|oom[-_]kill|OOMKilled|invoked oom-killer|OUT_OF_MEMORY|exceeded (?:job )?memory limit"
        r"|low on (?:memory|resource: memory)|is killed by signal: Killed|task \d+: Out Of Memory",
    ),
    _pattern(
        LogEventKind.HOST_REFUSED,
        "can't allocate memory|cannot allocate memory|memoryerror|bad_alloc|unable to allocate|new thread|memory allocation of",
        r"can't start new thread"
        r"|DefaultCPUAllocator: .{0,20}can't allocate memory|Cannot allocate memory|^\s*(?:\w+\.)*_?(?:Array)?MemoryError\b"
        r"|std::bad_alloc|Unable to allocate [\d.]+ \wi?B|memory allocation of \d+ bytes failed",
    ),
    _pattern(
        LogEventKind.SHM_FULL,
        "shm|shared memory|bus error|sigbus|exitcode|exit code",
        r"out of shared memory|unable to allocate shared memory"
        r"|insufficient shared memory|No space left on device.{0,40}shm|Bus error|SIGBUS"
        r"|creating shared memory segment /dev/shm|exit ?code\s*:? ?-7\b",
    ),
    _pattern(
        LogEventKind.DISK_FULL,
        "no space left|disk quota|ephemeral-storage|file too large|file size limit|iostream error|unexpected pos|streamwriter"
        "|requested and",
        r"No space left on device|Disk quota exceeded|low on resource: ephemeral-storage|File too large|File size limit"
        # torch's zip writer and numpy's tofile do not hand on why a write failed.
        r"|basic_ios::clear: iostream error|inline_container\.cc:\d+\] \. unexpected pos|PytorchStreamWriter failed writing"
        r"|\d+ requested and \d+ written",
    ),
    _pattern(
        LogEventKind.STOPPED,
        "cancelled|due to|preempted|keyboardinterrupt|sigterm|got signal|walltime|terminated|143",
        r"CANCELLED AT \S|DUE TO (?:TIME LIMIT|PREEMPTION|JOB REQUEUE)|job is preempted|^\s*(?:\[[^\]]{0,40}\]:?\s*)*"
        r"KeyboardInterrupt\b|Detected KeyboardInterrupt|Received SIGTERM: 15|got signal: (?:2|15)\b|killed: walltime"
        # A shell's words; launchers say such of ranks that they end themselves.
        r"|^\s*Terminated\s*$|line \d+: +\d+ Terminated\b|exit code:? 143\b",
    ),
    _pattern(
        LogEventKind.CRASH,
        "sigsegv|sigabrt|sigfpe|sigill|segmentation fault|exitcode|exit code|return code|core dumped",
        r"SIG(?:SEGV|ABRT|FPE|ILL)\b|Segmentation fault|exit ?code\s*:? ?-(?:4|6|8|11)\b|return code = -(?:4|6|8|11)\b"
        r"|exit ?code\s*:? ?13[2469]\b|\(core dumped\)",
    ),
    _pattern(
        LogEventKind.SIGKILL,
        "-9|sigkill|137|signal 9|killed",
        r"return code = -9\b|SIGKILL|exit ?code\s*:? ?(?:-9|137)\b|signal 9\b|^\S*\s*Killed\s*$|line \d+: +\d+ Killed\b",
    ),
    _pattern(LogEventKind.SCALE_FLOOR, "loss scale", r"loss scale already at minimum"),
    _pattern(
        LogEventKind.OVERFLOW, "overflow|skipping step", r"OVERFLOW!|Gradient overflow|Skipping step.{0,40}(?:loss )?scale"
    ),
    _pattern(
        LogEventKind.NAN_STOPPED,
        "returned nan|`training_step` is|non-finite",
        r"Function '\w+' returned nan values in its|loss returned in `training_step` is (?:nan|inf)"
        r"|total norm .{0,80}is non-finite",
    ),
    _pattern(
        LogEventKind.NAN,
        "nan|inf",
        r"(?:loss|\bnll|\bppl|grad[_ ]norm|gradient norm|perplexity)['\"]?(?:_\w+)?(?:\s*[:=]\s*|\s+)['\"]?(?:tensor\()?[-+]?"
        r"(?:nan|inf(?:inity)?)\b"
        r"|found NaN (?:in|gradients)|loss is (?:nan|inf)",
    ),
    # Megatron's lines, behind the loss that they state as well.
    _pattern(LogEventKind.OVERFLOW, "skipped iterations", r"number of skipped iterations:\s*[1-9]"),
    _pattern(
        LogEventKind.STUCK,
        "timeout|timed out|time out|monitoredbarrier",
        r"collective operation timeout|Timed out waiting \d+ms|operations have failed or timed out|Socket Timeout"
        r"|wait timeout after|monitoredBarrier|Store.{0,60}timed? ?out",
    ),
    _pattern(
        LogEventKind.PEER_GONE,
        "closed by|connection reset|broken pipe|remote process|sigterm|ncclremoteerror|peer",
        r"Connection (?:closed|reset) by|remote process (?:exited|has terminated)|ncclRemoteError|Broken pipe"
        r"|closing signal SIGTERM|Application timeout caused pair closure|Read error \[",
    ),
    _pattern(LogEventKind.CACHE_FLUSH, "cache flush", r"\d+ pytorch allocator cache flushes since last step"),
    _pattern(LogEventKind.SWAP, "swap", r"swap (?:is )?(?:full|exhausted)|Free swap\s*=\s*0kB|high swap"),
    _pattern(
        LogEventKind.BATCH_SIZES,
        "batch",
        r"Check batch related parameters|train_batch_size is not equal to micro_batch_per_gpu",
    ),
    _pattern(
        LogEventKind.FINISHED,
        "train_runtime|max_steps|max_epochs|exits successfully|training completed",
        r"['\"]train_runtime['\"]|`Trainer\.fit` stopped: `max_\w+=\d+` reached|exits successfully|Training completed",
    ),
    _pattern(
        LogEventKind.CHILD_FAILED,
        "exitcode|exit code|exit status|return code|via signal|abruptly",
        r"exit ?code\s*:? ?[1-9]\d* \(pid|\(exitcode: [1-9]|non-zero exit status [1-9]|exits with return code = [1-9]"
        r"|exited with exit code [1-9]|Terminating process \d+ via signal|terminated abruptly",
    ),
    # Last: the line that ends a traceback, "package.module.SomeError: text"; not what launchers raise when a rank has died.
    _pattern(
        LogEventKind.EXCEPTION,
        "error|exception|interrupt",
        r"^\s*(?:\[[^\]]{0,40}\]:?\s*)*(?:[A-Za-z_][\w.]*\.)?(?!ChildFailedError|CalledProcessError|ProcessRaised|ProcessExited)"
        r"[A-Z]\w*(?:Error|Exception|Interrupt)\b(?::|\s*$)",
    ),
)

#: Sizes in torch's message, which says them in these words since 2.1, and in others before.
_SIZES = {
    "tried": (rf"tried to allocate {_SIZE}",),
    "total": (rf"total capaci?ty of {_SIZE}", rf"\(GPU \d+; {_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free;"),
    "allowed": (rf"{_SIZE} allowed;",),
    "in_use": (rf"this process has {_SIZE} memory in use",),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "cached": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
    "resident": (r"anon-rss:(\d+)(kB)",),
}
_SIZE_PATTERNS = {name: tuple(re.compile(form, re.IGNORECASE) for form in forms) for name, forms in _SIZES.items()}
_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use", re.IGNORECASE)
_CPU_TRIED = re.compile(r"you tried to allocate (\d+) bytes", re.IGNORECASE)

_LOSS = re.compile(r"['\"]loss['\"]: ?['\"]?(-?[\d.]{1,20}(?:e[-+]?\d+)?)['\"]?[,}]")

_FINITE_LOSS = re.compile(r"loss['\"]?(?:_\w+)?(?:\s*[:=]\s*|\s+)['\"]?(?:tensor\()?-?\d", re.IGNORECASE)
#: The last line of a traceback whose exception's name does not say that it is one, as ``package.module.BadInput: text``.
_RAISED = re.compile(
    r"^(?:\[[^\]]{0,40}\]:? ?)*(?:\w+\.)+(?!ChildFailed|CalledProcess|ProcessRaised|ProcessExited)[A-Z]\w*(?::|$)"
)
_RANK = re.compile(r"\[?\brank[ :=]?(\d{1,6})\b\]?|^\[default(\d+)\]|^(\d+): ", re.IGNORECASE)
_GPU = re.compile(r"GPU (\d+)")
_FRAME = re.compile(r'File "([^"]{1,400})", line \d+, in ([\w<>.]+)')


def kind_of(line: str) -> LogEventKind | None:
    """Return the kind of event that a line reports; None where it has no bearing."""
    low = line.lower()
    for pattern in PATTERNS:
        if any(word in low for word in pattern.words) and pattern.regex.search(line):
            return pattern.kind
    return None


def sizes_in(text: str) -> dict[str, int]:
    """Read the sizes in an out-of-memory message, in bytes; ``others`` sums up those of other processes."""
    found = {}
    for name, forms in _SIZE_PATTERNS.items():
        match = next((m for form in forms if (m := form.search(text))), None)
        if match:
            found[name] = _bytes(match[1], match[2])
    if match := _CPU_TRIED.search(text):
        found["tried"] = int(match[1])
    if "reserved" in found and "allocated" in found:
        found.setdefault("cached", max(0, found["reserved"] - found["allocated"]))
    processes = sorted(_bytes(number, unit) for number, unit in _OTHERS.findall(text))
    if "in_use" not in found and "allocated" in found:
        # In a container torch does not know its own number there: the process that holds what torch does is this one.
        held = found["allocated"] + found.get("cached", 0)
        if own := next((size for size in processes if size >= held), 0):
            processes.remove(own)
            found["in_use"] = own
    if others := sum(processes):
        found["others"] = others
    return found


def _bytes(number: str, unit: str) -> int:
    try:
        return int(float(number) * _UNITS[unit.lower()])
    except ValueError:
        return 0


def loss_in(line: str) -> float | None:
    """Read the loss that the Trainer logs on a line; None without one, and beside rewards, where a loss may well be 0."""
    match = _LOSS.search(line)
    if match is None or "reward" in line:
        return None
    try:
        return float(match[1])
    except ValueError:
        return None


def has_finite_loss(line: str) -> bool:
    """Return whether a line states a loss that is a number."""
    return "loss" in line.lower() and _FINITE_LOSS.search(line) is not None


def ends_traceback(line: str) -> bool:
    """Return whether a line below the frames of a traceback names what was raised."""
    return _RAISED.match(line) is not None


def rank_of(line: str) -> int | None:
    """Return the rank that a line names; else None."""
    match = _RANK.search(line)
    return next((int(group) for group in match.groups() if group), None) if match else None


def gpu_of(line: str) -> int | None:
    """Return the GPU that torch's message names; else None."""
    match = _GPU.search(line)
    return int(match[1]) if match else None


def frames_in(line: str) -> Iterator[str]:
    """Yield the frames of a traceback that stand on a line, as ``file:function`` with the last two parts of the file's path."""
    for path, function in _FRAME.findall(line):
        yield f"{'/'.join(path.replace(chr(92), '/').split('/')[-2:])}:{function}"
