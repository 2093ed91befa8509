"""A process of a command that runs on a real GPU, under capture's counting of steps and parts: how much each part took.

A ``sitecustomize`` of :mod:`zeroplan.capturing.measuring` calls :func:`begin` in every Python process of the command, before
the script. Nothing is loaded until the script imports torch, and nothing of its tensors or files is changed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from typing import Any, cast

#: The environment's variable that holds a :class:`zeroplan.capturing.measuring.Orders` as JSON.
ORDERS = "ZEROPLAN_MEASURE"


def begin() -> None:
    """Wait for torch, where this process is one of a measured command."""
    if ORDERS not in os.environ:
        return
    from zeroplan.capturing.hooks.imports import when_imported

    orders = json.loads(os.environ[ORDERS])

    def follow(_torch: Any) -> None:
        _Measured(orders)

    when_imported("torch", follow)


class _Parts:
    """Stands where a capture's recorder does, and reads the allocator's peaks as parts of the script end."""

    def __init__(self) -> None:
        self.phase = 0
        self.peaks: dict[int, int] = {}
        self.allocated = self.reserved = 0
        self.out = self

    def add(self, _op: int, mark: int) -> None:
        """A part of the script ends."""
        self.peaks[mark] = max(self.peaks.get(mark, 0), self.read())

    def label(self, _tensor: Any, _buffer: str) -> None:
        """No tensor is followed."""

    def read(self) -> int:
        """Return the most bytes allocated since the last call."""
        cuda = sys.modules["torch"].cuda
        if not cuda.is_initialized():
            return 0
        peak = int(cuda.max_memory_allocated())
        self.allocated = max(self.allocated, peak)
        self.reserved = max(self.reserved, int(cuda.max_memory_reserved()))
        cuda.reset_peak_memory_stats()
        return peak


class _Nothing:
    """Stands where a capture's function mode does."""

    @staticmethod
    def again() -> contextlib.AbstractContextManager[None]:
        """No mode is on."""
        return contextlib.nullcontext()


class _Measured:
    """One process.

    Args:
        orders: steps, seconds, the limit in bytes, and the file for what was measured.
    """

    def __init__(self, orders: dict[str, Any]) -> None:
        import torch

        from zeroplan.capturing.ending import Ending
        from zeroplan.capturing.hooks.imports import when_imported
        from zeroplan.capturing.hooks.transformers_models import install_trainer
        from zeroplan.capturing.spans import Spans

        self.orders, self.parts = orders, _Parts()
        recorder, functions, capture = cast("Any", self.parts), cast("Any", _Nothing()), cast("Any", self)
        self.spans = Spans(recorder)
        self.spans.install(functions)
        ending = Ending(self.spans, orders["steps"], orders["seconds"])
        ending.install()
        self.ended, own = False, sys.excepthook

        def passed_on(kind: Any, error: Any, trace: Any) -> None:
            self.ended = kind is StopIteration and ending.done  # it asked a loader by hand, which gives no more batches
            own(kind, error, trace)

        sys.excepthook = passed_on
        self.steps = orders["steps"]
        when_imported("transformers.trainer", lambda module: install_trainer(capture, module))
        if orders["limit"]:
            torch.cuda._lazy_call(self._limited)
        atexit.register(self.write)

    @property
    def job(self) -> _Measured:
        """What a hook reads of a capture's job: the steps."""
        return self

    def trains(self, _model: Any) -> None:
        """A hook names the model, which is no matter here."""

    def _limited(self) -> None:
        """Leave the allocator so many bytes of the GPU."""
        import torch

        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.orders["limit"] / total))

    def write(self) -> None:
        """Add a line to the file, unless this process used no GPU."""
        import torch

        if not torch.cuda.is_initialized():
            return
        self.spans.close()
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        line = {
            "rank": int(os.environ.get("RANK", "0")),
            "pid": os.getpid(),
            "allocated": self.parts.allocated,
            "reserved": self.parts.reserved,
            "reserved_at_end": int(torch.cuda.memory_reserved()),
            "used_at_end": total - free,
            "retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
            "ended": self.ended,
            "steps": self.spans.steps or self.spans.backwards,
            "parts": {str(mark): peak for mark, peak in self.parts.peaks.items()},
            "gpu": torch.cuda.get_device_name(),
            "memory": total,
            "torch": torch.__version__,
        }
        with open(self.orders["answer"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
