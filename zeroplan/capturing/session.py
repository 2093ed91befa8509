"""Sets a capture up within a process, and runs the script in it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zeroplan.capturing import cuda, files, guards, hooks, places, world
from zeroplan.capturing.ending import EndedError
from zeroplan.capturing.recorder import ScriptRecorder, StoppedError
from zeroplan.capturing.source import trouble_line
from zeroplan.capturing.state import Capture


def install(capture: Capture) -> None:
    """Replace what the script would find on a machine with GPUs. There is no way back within this process."""
    job = capture.job
    places.set_gpu(job.world.local_rank)
    guards.install(job.card, job.gpus, lambda: capture.recorder.in_use)
    cuda.install(job.card, job.gpus, capture.recorder)
    capture.spans.install(capture.functions)
    capture.ending.install()
    world.install(capture)
    _parameters_without_memory(capture.recorder)
    hooks.install(capture)
    capture.overlay = files.install(job.folder)


@contextlib.contextmanager
def running(capture: Capture, *, raises: bool = False) -> Iterator[None]:
    """Run the script within this context.

    Args:
        capture: what is captured.
        raises: whether the code's own exceptions go on to the caller; else they are where it stopped, as for a script.
    """
    try:
        with capture.recorder, capture.functions:
            yield
    except EndedError as end:
        capture.ended = str(end.line or "")
        if end.follows is not None:
            says = f"{end.line} is where the loop was ended after its steps; {end.follows}, which follows it, was not run"
            capture.leave_out("after the steps", "more", says)
    except StoppedError as stop:
        capture.stop(stop.line or trouble_line(stop), stop.why)
    except BaseException as error:
        if raises:
            raise
        _failed(capture, error)


def _failed(capture: Capture, error: BaseException) -> None:
    """Note that a script ended by an exception."""
    if isinstance(error, SystemExit):
        if error.code not in (None, 0) or not capture.recorder.out.op:
            said = "the script exits" + (f" with {str(error.code)[:160]}" if error.code not in (None, 0) else " by itself")
            capture.stop(trouble_line(error), capture.last_words or said)
        return
    if isinstance(error, StopIteration) and capture.ending.done:  # an iterator over a loader that gives no more batches
        capture.ended = str(trouble_line(error) or "")
        return
    cause: BaseException = error
    while isinstance(cause.__cause__, StoppedError):
        cause = cause.__cause__
    text = " ".join(str(cause).split())[:240]
    if not isinstance(cause, StoppedError):
        import traceback

        traceback.print_exc(file=sys.stderr)
    capture.stop(trouble_line(cause), f"{type(cause).__name__}: {text}")


def _parameters_without_memory(recorder: ScriptRecorder) -> None:
    """Let parameters that a script makes on the host have no values; see Note [Tensors without memory]."""
    own: Any = nn.Parameter.__new__

    def made(cls: Any, data: Any = None, requires_grad: bool = True, *args: Any, **kwargs: Any) -> Any:
        plain = type(data) in (torch.Tensor, nn.Parameter)
        if plain and not places.without_memory(data) and (data.is_floating_point() or data.numel() > 1 << 20):
            with torch._C.DisableTorchFunction(), recorder.wanting("host"), torch.no_grad():
                data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=places.META)
        return own(cls, data, requires_grad, *args, **kwargs)

    nn.Parameter.__new__ = made  # type: ignore[method-assign]
