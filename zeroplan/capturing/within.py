"""A capture within this process: of the code in a ``with`` block, after which everything is as before."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from typing import Any

from zeroplan.capturing.machine import Job, World
from zeroplan.capturing.result import Captured
from zeroplan.capturing.run import planned_card
from zeroplan.core.cluster import Cluster


class CaptureBlock:
    """Captures between :meth:`begin` and :meth:`end`.

    Args:
        cluster: the machine that the code believes to run on, one process of it.
        steps: optimizer steps, after which loops end.
        seconds: the longest that the code may take.
    """

    def __init__(self, cluster: Cluster, *, steps: int, seconds: float) -> None:
        self._cluster, self._steps, self._seconds = cluster, steps, seconds

    def begin(self) -> None:
        """Replace what the code would find on a machine with a GPU, and record from here on."""
        from zeroplan.capturing import guards, session
        from zeroplan.capturing.hooks import imports
        from zeroplan.capturing.restoring import Restoring
        from zeroplan.capturing.state import Capture

        self._folder = tempfile.mkdtemp(prefix="zeroplan-capture-")
        card = planned_card(self._cluster.gpu, self._cluster)
        name, gpus = sys.argv[0] if sys.argv else "", self._cluster.gpus
        job = Job(name, False, (), False, {}, card, gpus, World(), self._steps, self._seconds, self._folder, "")
        self._restoring = Restoring()
        imports.on_change = self._restoring.note
        self._capture = Capture(job)
        os.environ.update(guards.ENVIRONMENT)
        session.install(self._capture)
        self._running = session.running(self._capture, raises=True)
        self._running.__enter__()

    def end(self, kind: Any, error: Any, trace: Any) -> tuple[Captured, bool]:
        """Put everything back; returns what was captured, and whether the code's exception is dealt with."""
        from zeroplan.capturing.hooks import imports

        try:
            handled = bool(self._running.__exit__(kind, error, trace))
            captured = self._capture.captured()
        finally:
            overlay = self._capture.overlay
            if overlay is not None:
                overlay.clearing = True  # its guard stays in the process, and refuses nothing any more
            _leave_group(self._capture)
            imports.on_change = None
            self._restoring.restore()
            shutil.rmtree(self._folder, ignore_errors=True)
        captured.command = "with zeroplan.capture()"
        captured.machine["alloc_conf"] = ""
        return captured, handled


def _leave_group(capture: Any) -> None:
    """End a process group that the code has joined."""
    if capture.process_group:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
