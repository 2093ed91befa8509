"""One capture within a process: the modes, what is replaced, and what comes of it."""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zeroplan.capturing import cuda, files, guards, hooks, places, world
from zeroplan.capturing.ending import EndedError, Ending
from zeroplan.capturing.functions import ScriptFunctions
from zeroplan.capturing.machine import Job
from zeroplan.capturing.recorder import ScriptRecorder, StoppedError
from zeroplan.capturing.result import Captured, Stop
from zeroplan.capturing.source import Line, trouble_line
from zeroplan.capturing.spans import Spans


class Capture:
    """Everything of one capture.

    Args:
        job: what is run, and for which machine.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.recorder = ScriptRecorder()
        self.functions = ScriptFunctions(self.recorder)
        self.spans = Spans(self.recorder)
        self.ending = Ending(self.spans, job.steps, job.seconds)
        self.overlay: files.Overlay | None = None
        self.stopped: Stop | None = None
        self.ended = ""
        self.model: dict[str, Any] = {}
        self.unmodelled: dict[str, tuple[str, str, str]] = {}
        self.engine: dict[str, Any] = {}
        self.workload: dict[str, Any] = {}
        self.process_group = False

    def install(self) -> None:
        """Replace what the script would find on a machine with GPUs. There is no way back within this process."""
        job = self.job
        places.set_gpu(job.world.local_rank if job.launched else 0)
        guards.install(job.card.name, job.card.memory, job.gpus)
        cuda.install(job.card, job.gpus, lambda: self.recorder.live)
        self.spans.install(self.functions)
        self.ending.install()
        world.install(self)
        _parameters_without_memory(self.recorder)
        hooks.install(self)
        self.overlay = files.install(job.folder)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the script within this context; it never raises."""
        try:
            with self.recorder, self.functions:
                yield
        except EndedError as end:
            self.ended = str(end.line or "")
        except StoppedError as stop:
            self._stop(stop.line or trouble_line(stop), stop.why)
        except SystemExit as left:
            if left.code not in (None, 0):
                self._stop(trouble_line(left), f"the script exits with {str(left.code)[:160]}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            cause: BaseException = error
            while isinstance(cause.__cause__, StoppedError):
                cause = cause.__cause__
            text = " ".join(str(cause).split())[:240]
            if not isinstance(cause, StoppedError):
                import traceback

                traceback.print_exc(file=sys.stderr)
            self._stop(trouble_line(cause), f"{type(cause).__name__}: {text}")

    def _stop(self, line: Line | None, why: str) -> None:
        at = line or Line(self.job.target, 0)
        self.stopped = Stop(at.file, at.line, why)

    def leave_out(self, key: str, effect: str, says: str) -> None:
        """Note what no figure holds."""
        self.unmodelled.setdefault(key, (key, effect, says))

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
        return Captured(
            op=array("b", out.op),
            arg=array("q", out.arg),
            aux=array("q", out.aux),
            sizes=[alloc.size for alloc in out.allocs],
            buffers=self.recorder.labels,
            phases=bytes(alloc.phase for alloc in out.allocs),
            way="engine" if self.engine else "loop",
            steps=self.spans.steps,
            stopped=self.stopped,
            ended=self.ended,
            notes=[f"{line}: {what}" for line, what in self.recorder.invented_reads.items()],
            unmodelled=list(self.unmodelled.values()),
            engine=self.engine,
            model=self.model,
            workload=self.workload,
            collectives=self.process_group,
        )


def _parameters_without_memory(recorder: ScriptRecorder) -> None:
    """Let parameters that a script makes on the host have no values; see Note [Tensors without memory]."""
    own: Any = nn.Parameter.__new__

    def made(cls: Any, data: Any = None, requires_grad: bool = True, *args: Any, **kwargs: Any) -> Any:
        plain = type(data) in (torch.Tensor, nn.Parameter)
        if plain and not places.without_memory(data) and (data.is_floating_point() or data.numel() > 1 << 20):
            with recorder.wanting("host"), torch.no_grad():
                data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=places.META)
        return own(cls, data, requires_grad, *args, **kwargs)

    nn.Parameter.__new__ = made  # type: ignore[method-assign, assignment]
