"""Finds work of two streams on the same memory that no event orders, without a GPU.

On a CPU all runs in program order, and a wait that is missing shows nowhere. Here streams and events are clocks: each stream
counts its events, and one that waits for an event knows of all that happened before it. Two uses of the same bytes, of which
one writes, must know of each other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from zeroplan_runtime import streams
from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.gradient_reduction import GradientReduction
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.optim.step import OptimizerStep
from zeroplan_runtime.parameter_guard import ParameterGuard
from zeroplan_runtime.parameter_states import ParameterStates
from zeroplan_runtime.schedule import Schedule

COMPUTE = 0


class Use(NamedTuple):
    begin: int
    end: int
    writes: bool
    stream: int
    time: int
    what: str


class Clocks:
    """What each stream knows of the others, and who has used which memory; `races` are pairs of uses in no order."""

    def __init__(self, *, deaf: bool) -> None:
        self.deaf = deaf
        self.known: list[dict[int, int]] = [{COMPUTE: 1}]
        self.current = [COMPUTE]
        self.races: set[tuple[str, str]] = set()
        self._uses: dict[int, list[Use]] = {}

    def use(self, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        if not tensor.numel():
            return
        stream, begin = self.current[-1], tensor.data_ptr()
        known = self.known[stream]
        now = Use(begin, begin + tensor.numel() * tensor.element_size(), writes, stream, known[stream], what)
        uses = self._uses.setdefault(tensor.untyped_storage().data_ptr(), [])
        for one in uses:
            meets = one.begin < now.end and now.begin < one.end and (one.writes or writes)
            if meets and one.stream != stream and known.get(one.stream, 0) < one.time:
                self.races.add((one.what, what))
        uses[:] = [one for one in uses if one.stream != stream or one[:3] != now[:3]] + [now]


def _classes(clocks: Clocks) -> tuple[type, type]:
    class Event:
        def __init__(self, device: Any) -> None:
            self._known: dict[int, int] = {}

        def record(self, stream: Any) -> None:
            known = clocks.known[stream.number()]
            self._known = dict(known)
            known[stream.number()] += 1

        def wait(self, stream: Any) -> None:
            known = clocks.known[stream.number()]
            for other, time in self._known.items() if not clocks.deaf else ():
                known[other] = max(known.get(other, 0), time)

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

    class Stream:
        def __init__(self, device: Any) -> None:
            self._number: int | None = len(clocks.known)
            clocks.known.append({self._number: 1})

        @classmethod
        def current(cls, device: Any) -> Any:
            made = cls.__new__(cls)
            made._number = None
            return made

        def number(self) -> int:
            return clocks.current[-1] if self._number is None else self._number

        key = number

        @contextmanager
        def as_current(self) -> Iterator[None]:
            clocks.current.append(self.number())
            try:
                yield
            finally:
                clocks.current.pop()

    return Event, Stream


@contextmanager
def watched(*, deaf: bool = False) -> Iterator[Clocks]:
    """Enters a context in which engines are made and used; gives their clocks. If `deaf`, no wait is heard."""
    clocks = Clocks(deaf=deaf)
    use = clocks.use
    with ExitStack() as stack:
        for kind, ours in zip((streams.Event, streams.Stream), _classes(clocks), strict=True):
            for module in [one for name, one in sys.modules.items() if name.startswith("zeroplan_runtime")]:
                if vars(module).get(kind.__name__) is kind:
                    stack.enter_context(patch.object(module, kind.__name__, ours))

        def before(owner: type, name: str, look: Callable[..., Callable[[], None] | None]) -> None:
            method = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                afterwards = look(*args, **kwargs)
                result = method(*args, **kwargs)
                if afterwards is not None:
                    afterwards()
                return result

            stack.enter_context(patch.object(owner, name, call))

        def gathers(_: Any, whole: torch.Tensor, shard: torch.Tensor) -> None:
            use(shard, "a gather reads the shard", writes=False)
            own = (shard.data_ptr() - whole.data_ptr()) // whole.element_size()
            others = [whole[:own], whole[own + shard.numel() :]] if 0 <= own < whole.numel() else [whole]
            for part in others:  # in place, a rank's own part stays as it is
                use(part, "a gather writes the parameters", writes=True)

        def reduces(_: Any, shard: torch.Tensor, whole: torch.Tensor) -> None:
            use(whole, "a reduction uses the gradients", writes=True)
            use(shard, "a reduction writes the shard", writes=True)

        def updates(_: Any, part: Any, *more: Any) -> None:
            use(part.master, "an update writes the master", writes=True)
            use(part.grad if part.grad is not None else part.unit.grad, "an update reads the gradients", writes=False)
            for state in part.states:
                use(state, "an update writes a state", writes=True)

        def reads(_: Any, unit: Any) -> None:
            for flat in unit.flats():
                use(flat.full, "a unit computes", writes=False)

        def fills(_: Any, master: torch.Tensor, *more: Any, **options: Any) -> None:
            use(master, "a write of the user's reaches the master", writes=True)

        def frees(owner: Any, *_: Any) -> Callable[[], None]:
            freed = [one for unit in owner.units for flat in unit.flats() for one in (flat.full, flat.shard)]

            def afterwards() -> None:
                for one in freed:
                    use(one, "memory is freed", writes=True)

            return afterwards

        def states(owner: Any, unit: Any, buffer: Any, begin: int, end: int, values: Any) -> None:
            use(owner._tensor(unit, buffer)[begin:end], "the user writes a state", writes=True)

        def adds(owner: Any, unit: Any, position: int, *more: Any, **options: Any) -> None:
            owner.acquire(unit)
            use(unit.grads.views[position], "a gradient arrives", writes=True)

        before(Communicator, "all_gather", gathers)
        before(Communicator, "reduce_scatter", reduces)
        before(OptimizerStep, "update", updates)
        before(ParameterGuard, "open", reads)
        before(Schedule, "_reshard", reads)
        before(ModelStates, "fill_shard", fills)
        before(ModelStates, "free", frees)
        before(ParameterStates, "_write", states)
        before(GradientReduction, "accumulate", adds)
        yield clocks
