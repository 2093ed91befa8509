"""Reading of a log: its text becomes events in one pass over the lines."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from zeroplan.core.plumbing.files import read_tail
from zeroplan.logs.events import LogEvent, LogEventKind, Stated
from zeroplan.logs.patterns import (
    DEEPSPEED_SAID,
    ends_traceback,
    frames_in,
    gpu_of,
    has_finite_loss,
    kind_of,
    loss_in,
    rank_of,
    sizes_in,
)

#: Of a longer log the end is read: that is where runs die.
MOST_BYTES = 64 << 20
#: Characters of a line that are looked at, and kept.
_MOST_LINE, _MOST_SHOWN = 4000, 240
#: Events of one kind that are kept, from the first on; the last one is kept as well.
_MOST_EVENTS = 200
_MOST_FRAMES = 200
#: A loss that was above `_TRAINS` and then exactly 0 so many times, until the log ends, is of a run that computes NaNs.
_TRAINS, _ZEROS = 0.1, 5

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SECONDS = re.compile(r"\b([\d.]{1,12}) ?s/it\b")
_PER_SECOND = re.compile(r"\b([\d.]{1,12}) ?it/s\b")
#: As nanoGPT's and Megatron's loops print a step's time.
_MILLISECONDS = re.compile(
    r"^ *(?:iter|step)\b.{0,120}?\btime[:=]? ?([\d.]{1,12}) ?ms\b|elapsed time per iteration \(ms\): ?([\d.]{1,12})"
)
_STATED = {
    "micro_batch": re.compile(r"Instantaneous batch size per device = ([\d,]+)|train_micro_batch_size_per_gpu[ .\"':=]+(\d+)"),
    "grad_accum": re.compile(r"Gradient Accumulation steps = ([\d,]+)|gradient_accumulation_steps[ .\"':=]+(\d+)"),
    "trainable": re.compile(r"Number of trainable parameters = ([\d,]+)|trainable params: ([\d,]+)"),
    "world_size": re.compile(r"dist_world_size=(\d+)|world_size[ .\"':=]+(\d+)"),
    "stage": re.compile(r"zero_optimization_stage[ .]+(\d)|\"stage\": (\d)"),
}
_DTYPE = re.compile(r"bfloat16_enabled[ .]+(True)|(?:fp16|float16)_enabled[ .]+(True|auto)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Log:
    """The events of a log, and the settings that it states.

    Attributes:
        events: in the log's order.
        stated: sizes of the run.
        step_seconds: seconds of each step that a progress bar or a logger shows.
        lines: lines read.
        skipped: bytes before them that were not read.
        last_finite: the last line with a loss that is a number; 0 without one.
    """

    events: tuple[LogEvent, ...]
    stated: Stated
    step_seconds: tuple[float, ...]
    lines: int
    skipped: int = 0
    last_finite: int = 0

    def of(self, *kinds: LogEventKind) -> list[LogEvent]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def slowdown(self) -> float | None:
        """The last quarter's median step over the first quarter's, without the first three; None for fewer than 20 steps."""
        steps = self.step_seconds[3:]
        if len(steps) < 20:
            return None
        quarter = len(steps) // 4
        first, last = statistics.median(steps[:quarter]), statistics.median(steps[-quarter:])
        return last / first if first else None


@dataclass(slots=True)
class _Pass:
    """State of one pass over the lines."""

    frames: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[LogEventKind, int] = field(default_factory=lambda: defaultdict(int))
    last: dict[LogEventKind, LogEvent] = field(default_factory=dict)
    events: list[LogEvent] = field(default_factory=list)
    stated: dict[str, int] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    dtype: str | None = None
    deepspeed: str | None = None
    loss: float = 0.0  # the last that is not 0
    last_finite: int = 0
    zeros: list[LogEvent] = field(default_factory=list)  # the losses of exactly 0 since then


def read_log(path: str) -> Log:
    """Read the events of a log file. Raises BadInput: when it cannot be read, or is no text."""
    data, size = read_tail(path, MOST_BYTES, where="LOG", remedy="give the text that the run printed")
    if b"\0" in data[:4096]:
        from zeroplan.core.errors import BadInput

        raise BadInput(
            f"{path} is no text", where="LOG", remedy="give what the run printed, or a torch memory snapshot .pickle"
        )
    return parse_log(data.decode("utf-8", "replace"), skipped=size - len(data))


def parse_log(text: str, *, skipped: int = 0) -> Log:
    """Read the events of a log's text; `skipped` bytes stand before it."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    state = _Pass()
    for number, line in enumerate(lines, 1):
        if line.strip():
            _line(state, number, _ANSI.sub("", line[:_MOST_LINE]))
    for kind, event in state.last.items():
        if state.counts[kind] > _MOST_EVENTS:
            state.events.append(event)
    if len(state.zeros) >= _ZEROS:
        state.events += state.zeros
    events = tuple(sorted(state.events, key=lambda event: event.line))
    stated = Stated(**state.stated, dtype=state.dtype, deepspeed=state.deepspeed)
    return Log(events, stated, tuple(state.steps), len(lines), skipped, state.last_finite)


def _line(state: _Pass, number: int, line: str) -> None:
    _state_facts(state, line)
    loss = loss_in(line)
    if loss:
        state.loss, state.zeros = loss, []
    elif loss is not None and abs(state.loss) >= _TRAINS and len(state.zeros) < _ZEROS:
        state.zeros.append(LogEvent(LogEventKind.ZERO_LOSS, number, _shown(line), rank_of(line)))
    if has_finite_loss(line) and not (loss == 0 and "nan" in line.lower()):  # the Trainer shows a loss of NaN as 0
        state.last_finite = number
    before = line.partition('File "')[0].strip()
    if "Traceback (most recent call last)" in line:
        state.frames[line.partition("Traceback")[0].strip()] = []
        return
    found = list(frames_in(line))
    if found:
        frames = state.frames[before]
        frames.extend(found[: max(0, _MOST_FRAMES - len(frames))])
        return
    kind = kind_of(line)
    if (
        kind is None
        and ends_traceback(line)
        and any(line.startswith(prefix) for prefix, above in state.frames.items() if above)
    ):
        kind = LogEventKind.EXCEPTION
    if kind is None:
        return
    sizes = sizes_in(line)
    gpu = gpu_of(line) if kind is LogEventKind.GPU_OOM else None
    event = LogEvent(kind, number, _shown(line), rank_of(line), gpu, sizes, tuple(_frames_above(state.frames, line)))
    state.counts[kind] += 1
    state.last[kind] = event
    if state.counts[kind] <= _MOST_EVENTS:
        state.events.append(event)


def _frames_above(frames: dict[str, list[str]], line: str) -> Iterable[str]:
    """Return the frames of the traceback that this line ends: the one with the same prefix, as launchers put before a rank's
    lines.
    """
    prefixes = sorted((prefix for prefix in frames if line.strip().startswith(prefix)), key=len)
    return frames.pop(prefixes[-1]) if prefixes else ()


def _state_facts(state: _Pass, line: str) -> None:
    for name, regex in _STATED.items():
        if name not in state.stated and (match := regex.search(line)):
            state.stated[name] = int(next(group for group in match.groups() if group).replace(",", ""))
    if state.dtype is None and (match := _DTYPE.search(line)):
        state.dtype = "bf16" if match[1] else "fp16"
    if state.deepspeed is None and "eep" in line and (match := DEEPSPEED_SAID.search(line)):
        state.deepspeed = match[1] or match[2]
    for regex, invert in ((_SECONDS, False), (_PER_SECOND, True)):
        if match := regex.search(line):
            value = _number(match[1])
            if value:
                state.steps.append(1 / value if invert else value)
    if (match := _MILLISECONDS.search(line)) and (value := _number(match[1] or match[2])):
        state.steps.append(value / 1000)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _shown(line: str) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in line).split())
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
