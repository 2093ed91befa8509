"""``with zeroplan.capture() as plan:``: the memory that any code would take on a GPU, from within a program or a test."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan, Report

if TYPE_CHECKING:
    from zeroplan.capturing.answer import CapturedRun
    from zeroplan.capturing.result import Captured
    from zeroplan.capturing.within import CaptureBlock


class Fit:
    """Whether code fits a card: true only where the plan says that it does. Its text is the whole verdict, for ``assert``.

    Args:
        report: the plan on that card.
    """

    def __init__(self, report: Report) -> None:
        self.report = report

    def __bool__(self) -> bool:
        return bool(self.report.plans[0].fits)

    def __repr__(self) -> str:
        from zeroplan.report.verdict import verdict

        return f"<{verdict(self.report)}>"


class CapturedCode:
    """What ``with zeroplan.capture() as plan:`` gives: filled when the block ends. Sizes are bytes."""

    def __init__(self, gpu: str | None, vram: str | int | None) -> None:
        self._gpu, self._vram = gpu, vram
        self._captured: Captured | None = None
        self._runs: dict[tuple[Any, Any], CapturedRun] = {}

    def fits(self, vram: str | int | None = None, *, gpu: str | None = None) -> Fit:
        """Return whether the code fits a card.

        Args:
            vram: the card's memory, as ``"24G"``; None for the card's own.
            gpu: the card; None for the one of the block.

        Raises:
            BadInput: neither here nor for the block a card or a limit was named, or the block has not ended.
        """
        run = self._run(gpu, vram)
        if run.report.plans[0].gpu.usable is None:
            raise BadInput("there is no limit to hold the plan against", where="fits", remedy='give "24G", or gpu="A100-80G"')
        return Fit(run.report)

    @property
    def report(self) -> Report:
        """The plan on the block's card, as ``zeroplan capture --json`` prints it."""
        return self._run(None, None).report

    @property
    def plan(self) -> MemoryPlan:
        """The one plan of the report."""
        return self.report.plans[0]

    @property
    def peak_allocated(self) -> int:
        """The most that torch's allocator hands out."""
        return self.plan.gpu.peak_allocated or 0

    @property
    def peak_reserved(self) -> int:
        """The most that torch's allocator takes of the card."""
        return self.plan.gpu.peak_reserved or 0

    def save(self, path: str) -> None:
        """Keep the answer in a file, which ``--from`` takes."""
        from zeroplan.capturing.kept import keep

        run = self._run(None, None)
        assert self._captured is not None
        keep(run, self._captured, path)

    def __str__(self) -> str:
        if self._captured is None:
            return repr(self)
        from zeroplan.report.captured import captured_text

        return captured_text(self.report)

    def _run(self, gpu: str | None, vram: str | int | None) -> CapturedRun:
        if self._captured is None:
            raise BadInput("the block has not ended", where="capture", remedy="ask after the with block")
        key = (gpu or self._gpu, vram if vram is not None or gpu is not None else self._vram)
        if key not in self._runs:
            from zeroplan.capturing.answer import answer

            self._runs[key] = answer(self._captured, Cluster.of(gpu=key[0], vram=key[1]))
        return self._runs[key]


class capture:  # a verb, as contextlib's own
    """Capture the code of a ``with`` block: what it would take on a GPU, though there is none and no weight is read.

    The code runs, on this process's CPU: tensors that it puts on ``cuda`` have shapes and no values, files that it writes go to
    a temporary folder, and there is no network. Loops end after `steps` optimizer steps. Its own exceptions are raised as ever;
    where it needs what no rule knows, the block ends there and `fits` is false. Make models and optimizers within the block.

    Args:
        gpu: the card that the code believes in: H100, RTX4090, ….
        vram: its memory, as ``"24G"``; None for the card's own.
        steps: optimizer steps.
        seconds: the longest that the code may take.

    Raises:
        BadInput: an unknown card, or torch is not installed.
    """

    def __init__(
        self, gpu: str | None = None, *, vram: str | int | None = None, steps: int = 3, seconds: float = 600.0
    ) -> None:
        self._cluster = Cluster.of(gpu=gpu, vram=vram)
        self._steps, self._seconds = steps, seconds
        self._plan = CapturedCode(gpu, vram)
        self._block: CaptureBlock | None = None

    def __enter__(self) -> CapturedCode:
        import importlib.util

        if importlib.util.find_spec("torch") is None:
            raise BadInput("needs torch, as the code does", where="capture", remedy="pip install 'zeroplan[torch]'")
        from zeroplan.capturing.within import CaptureBlock

        self._block = CaptureBlock(self._cluster, steps=self._steps, seconds=self._seconds)
        self._block.begin()
        return self._plan

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        assert self._block is not None
        self._plan._captured, handled = self._block.end(kind, error, trace)
        return handled
