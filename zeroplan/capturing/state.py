"""What one capture knows: its modes, what it counts, and what comes of it."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from torch import nn

from zeroplan.capturing.batches import forwards_differ, read_on
from zeroplan.capturing.ending import Ending
from zeroplan.capturing.files import Overlay
from zeroplan.capturing.functions import ScriptFunctions
from zeroplan.capturing.machine import Job
from zeroplan.capturing.recorder import ScriptRecorder
from zeroplan.capturing.result import Captured, Stop
from zeroplan.capturing.source import CodeLine
from zeroplan.capturing.spans import Spans


class Capture:
    """Everything of one capture.

    Args:
        job: what is run, and for which machine.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.recorder = ScriptRecorder()
        self._forked = Path(job.folder, "forked")  # what a forked process tells this one by
        self.recorder.on_fork = self._note_fork
        self.functions = ScriptFunctions(self.recorder)
        self.spans = Spans(self.recorder)
        self.spans.on_module.append(self.trains)
        self.ending = Ending(self.spans, job.steps, job.seconds)
        self.recorder.waits = lambda: not self.ending.done
        self._ends: list[int] = []
        self.spans.on_step.append(self._stepped)
        self.overlay: Overlay | None = None
        self.stopped: Stop | None = None
        self.ended = ""
        self.model: dict[str, Any] = {}
        self.unmodelled: dict[str, tuple[str, str, str]] = {}
        self.handed: Any = None  # what an engine was given (capturing/engines/handed.py)
        self.engine_notes: dict[str, Any] = {}
        self.resolved: Any = None  # what an engine resolved that plans a model of its own (capturing/engines/megatron.py)
        self.in_trainer = False
        self.workload: dict[str, Any] = {}
        self.process_group = False
        self.invented: dict[str, str] = {}
        self.last_words = ""  # what the script said as it ended itself

    def stop(self, line: CodeLine | None, why: str) -> None:
        """Note where the script cannot go on, and why."""
        at = line or CodeLine(self.job.target, 0)
        self.stopped = Stop(at.file, at.line, why)

    def leave_out(self, key: str, effect: str, says: str) -> None:
        """Note what no figure holds."""
        self.unmodelled.setdefault(key, (key, effect, says))

    def _note_fork(self, line: CodeLine | None) -> None:
        self._forked.write_text(str(line), encoding="utf-8")

    def _stepped(self) -> None:
        if len(self._ends) < min(self.spans.steps, self.job.steps):  # one behind those is of fewer micro batches
            self._ends.append(len(self.recorder.out.op))

    def trains(self, model: nn.Module) -> None:
        """Note the model, if it is the largest so far."""
        params = {id(p): p for p in model.parameters()}
        count = sum(p.numel() for p in params.values())
        if count > self.model.get("params", 0):
            trainable = sum(p.numel() for p in params.values() if p.requires_grad)
            name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
            self.model = {"name": str(name), "params": count, "trainable": trainable}

    def captured(self) -> Captured:
        """Return what was captured."""
        self.spans.close()
        out = self.recorder.out
        if self._forked.is_file():
            says = f"{self._forked.read_text(encoding='utf-8')} puts tensors on a GPU in a process of its own, in no figure"
            self.leave_out("processes", "more", says)
        if self.spans.backwards and not self.spans.steps:
            self.invented["steps"] = "no optimizer of torch's steps: each backward counts as a step"
        engine = self.resolved or {}
        if engine:
            self.unmodelled.clear()  # notes of what setup allocates, which is in no figure
        elif self.handed is not None and self.handed.batches.slices:
            engine = self.handed.as_data()
            self.unmodelled.pop("ranks", None)
        captured = Captured(
            op=array("b", out.op),
            arg=array("q", out.arg),
            aux=array("q", out.aux),
            sizes=[alloc.size for alloc in out.allocs],
            buffers=self.recorder.labels,
            phases=bytes(alloc.phase for alloc in out.allocs),
            steps=self.spans.steps or self.spans.backwards,  # a loop may update by hand
            stopped=self.stopped,
            ended=self.ended or ", ".join(map(str, {**self.recorder.ended, **self.ending.ended})),
            notes=[*self.invented.values(), *(f"{line}: {what}" for line, what in self.recorder.invented_reads.items())],
            unmodelled=list(self.unmodelled.values()),
            engine=engine,
            model=self.model,
            workload=self.workload | ({"bf16": True} if self.recorder.bf16 else {}),
            collectives=self.process_group,
            lines=["" if line is None else line.short for line in self.recorder.lines],
            line_of=self.recorder.line_of,
        )
        if self.resolved is None:
            self._beyond(captured)
        return captured

    def _beyond(self, captured: Captured) -> None:
        """Note whether the steps that follow may cost more; see Note [Batches beyond the captured steps]."""
        for line, holds in self.recorder.open_branches.items():
            says = f"{line}: a condition on values of the GPU is taken to be {str(holds).lower()}, and decides what runs"
            captured.unmodelled.append(("condition", "unknown", says))
        with self.recorder, self.functions:
            drawn = read_on(self.ending.passes, self.spans.backwards)
        ran = forwards_differ(captured, captured.sizes, self._ends, () if self.handed is None else self.handed.batches.apart)
        if drawn is None or (not drawn.open and drawn.says.endswith("of one shape") and ran is not None and ran.open):
            drawn = ran
        if drawn is None:
            return
        if drawn.open:
            captured.unmodelled.append(("batches", "more", drawn.says))
        captured.workload["batches"] = drawn.says
