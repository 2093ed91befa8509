"""Ends a script after the steps asked for: loaders give as many batches as those take, and a loop without one is ended."""

from __future__ import annotations

import functools
import gc
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from zeroplan.capturing import loops
from zeroplan.capturing.batches import Pass, shapes_of
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import CodeLine, is_users, user_line
from zeroplan.capturing.spans import Spans

#: Seconds after the last step that passes over loaders may take, where epochs follow that have nothing left to train.
_AFTERWARDS = 30.0


class EndedError(SystemExit):
    """The steps asked for are done, and a loop that cannot be ended would go on; a process that nobody holds ends with 0 then.

    Args:
        line: where it was.
        follows: what would run behind it, and may put something on the GPU.
    """

    def __init__(self, line: CodeLine | None, follows: CodeLine | None = None) -> None:
        super().__init__(0)
        self.line, self.follows = line, follows


class Ending:
    """Counts steps and batches.

    Args:
        spans: counts the steps.
        steps: how many are wanted.
        seconds: the longest that the script may take.
    """

    def __init__(self, spans: Spans, steps: int, seconds: float) -> None:
        self.spans, self.wanted = spans, steps
        self._until = time.monotonic() + seconds
        self._seconds = seconds
        self._by_hand = self.loader_ended = False
        self._last_step: float | None = None
        self._training: Any = weakref.WeakSet()
        self.passes: list[Pass] = []
        self.ended: dict[CodeLine, None] = {}  # loops that went over nothing that ends with the steps
        spans.on_step.append(self._stepped)
        spans.on_backward.append(self._backward)

    @property
    def taken(self) -> int:
        """Steps by now: where no optimizer is there, the script updates by hand behind each backward."""
        return self.spans.steps or (self.spans.backwards if self._by_hand else 0)

    @property
    def done(self) -> bool:
        """Whether the steps asked for are taken."""
        return self.taken >= self.wanted

    def _stepped(self) -> None:
        if self.done and self._last_step is None:
            self._last_step = time.monotonic()
        if self.taken > self.wanted + self.loader_ended:  # accelerate steps once more with the batch that it has drawn ahead
            self._leave()
        self._in_time()

    def _leave(self) -> None:
        """End the loop around the step, and all around it where one went on; see Note [Loops that end]."""
        line = loops.end_loops(all_of_them=bool(self.ended))
        if line is None or (self._last_step is not None and time.monotonic() - self._last_step > _AFTERWARDS):
            raise EndedError(user_line(), loops.what_follows())
        self.ended.setdefault(line)

    def _backward(self) -> None:
        if not self.spans.steps and self.spans.backwards == self.wanted:
            self._by_hand = not any(issubclass(type(one), torch.optim.Optimizer) for one in gc.get_objects())
        if self._by_hand:
            self._stepped()
        self._in_time()

    def _in_time(self) -> None:
        if time.monotonic() > self._until:
            raise StoppedError(f"the script took longer than {self._seconds:.0f} s (--seconds)", user_line())

    def install(self) -> None:
        """Let every loader give as many batches as the steps take, from the process itself."""
        from torch.utils.data import DataLoader

        own_init, own_iter = DataLoader.__init__, DataLoader.__iter__
        ending = self

        @functools.wraps(own_init)
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            workers = kwargs.get("num_workers", args[5] if len(args) > 5 else 0)
            for name, value in (("num_workers", 0), ("persistent_workers", False), ("prefetch_factor", None), ("timeout", 0),
                                ("pin_memory", False), ("multiprocessing_context", None)):  # fmt: skip
                if name in kwargs:
                    kwargs[name] = value
            own_init(loader, *args, **kwargs)
            if loader.num_workers:
                loader.num_workers = 0
            loader.__dict__["_asked_workers"] = workers

        def iterate(loader: Any) -> Iterator[Any]:
            workers = loader.__dict__.get("_asked_workers") or 0
            batches = own_iter(loader)
            return _Batches(ending, loader, _AsWorker(batches, workers, loader.dataset) if workers else batches)

        plain: Any = DataLoader
        plain.__init__, plain.__iter__ = init, iterate


class _AsWorker:
    """A loader's batches as the first of its worker processes draws them, of which a data set may ask."""

    def __init__(self, batches: Any, workers: int, dataset: Any) -> None:
        from torch.utils.data._utils import worker

        self._home: Any = worker
        self._batches = batches
        self._info = worker.WorkerInfo(id=0, num_workers=workers, seed=0, dataset=dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> _AsWorker:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        before, self._home._worker_info = self._home._worker_info, self._info
        try:
            return next(self._batches)
        finally:
            self._home._worker_info = before


class _Batches:
    """The batches of one pass over a loader."""

    def __init__(self, ending: Ending, loader: Any, batches: Iterator[Any]) -> None:
        self._ending, self._loader, self._batches = ending, loader, batches
        self._first_step = ending.spans.steps
        self._first_backward = ending.spans.backwards
        self._given = 0
        self._pass = Pass(batches, self._first_backward)
        self._over = ending.done and loader in ending._training

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        ending, spans = self._ending, self._ending.spans
        ending._in_time()
        trains = spans.backwards > self._first_backward
        if trains:
            if self._loader not in ending._training:
                ending.passes.append(self._pass)
            ending._training.add(self._loader)
        over = self._over
        if trains:
            over = ending.done
        elif not over:
            over = self._given >= max(2, ending.wanted)  # accelerate draws one ahead
        if over:
            frame = sys._getframe(1)
            if self._over and ending._last_step is not None and time.monotonic() - ending._last_step > _AFTERWARDS:
                raise EndedError(user_line(), loops.what_follows())
            if not is_users(frame.f_code.co_filename) or _in_for(frame):  # a loop that draws by hand is ended by its steps
                ending.loader_ended |= ending.done
                raise StopIteration
        batch = next(self._batches)
        self._given += 1
        self._pass.drawn.append(shapes_of(batch))
        return batch


def _in_for(frame: Any) -> bool:
    """Return whether the frame's next instruction is that of a ``for``, which takes an end."""
    import dis

    code = frame.f_code
    return bool(dis.opname[code.co_code[frame.f_lasti]].startswith("FOR_ITER"))
