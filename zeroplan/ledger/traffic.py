"""Lines of work and traffic: operations, kernels and bytes moved, with one formula each, as in :mod:`zeroplan.ledger.line`.

A line of memory gives the bytes of a buffer. A line of work gives the amount of a resource that one micro batch or one
optimizer step uses. Divided by the machine's rate for that resource it is a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, NamedTuple

from zeroplan.core.buffers import Phase
from zeroplan.core.rates import Rates
from zeroplan.ledger.derive import expression
from zeroplan.ledger.line import Documented, Formula, symbols


class Executor(StrEnum):
    """Parts of a machine that carry out work. Different executors can work at the same time, where the engine lets them."""

    PYTHON = "python"  # the process that issues kernels
    GPU = "gpu"
    LINK = "link"  # between GPUs
    PCIE = "pcie"  # between a GPU and its host
    HOST = "host"  # the host's cores and memory
    DISK = "disk"
    STALL = "stall"  # the host waits for the driver, which waits for the GPU: nothing else goes on


_TERA, _GIGA = 1e12, 1e9


class Resource(Enum):
    """Resources that a piece of work uses: name, executor, field of Rates, and the unit of that rate.

    Seconds are amount ÷ (rate × unit). Without a unit the rate is µs a call, and seconds are amount × rate ÷ 10^6. The comment
    names the unit of the amount; calls, where there is none.
    """

    executor: Executor
    rate_name: str
    unit: float

    def __new__(cls, name: str, executor: Executor, rate_name: str, unit: float = 0.0) -> Resource:
        """Make a member whose value is its name."""
        member = object.__new__(cls)
        member._value_, member.executor, member.rate_name, member.unit = name, executor, rate_name, unit
        return member

    MATMUL = "matmul", Executor.GPU, "matmul_tflops", _TERA  # operations
    FP8_MATMUL = "fp8 matmul", Executor.GPU, "fp8_tflops", _TERA  # operations
    FP32_MATMUL = "fp32 matmul", Executor.GPU, "fp32_tflops", _TERA  # operations
    ATTENTION = "attention", Executor.GPU, "attention_tflops", _TERA  # operations
    HBM = "hbm", Executor.GPU, "hbm_gbs", _GIGA  # bytes
    KERNEL = "kernel", Executor.GPU, "kernel_us"  # calls, on the GPU
    LAUNCH = "launch", Executor.PYTHON, "launch_us"  # calls, on the host, from Python
    AUTOGRAD = "autograd", Executor.PYTHON, "autograd_us"  # calls, on the host, from the backward's thread
    CHECKPOINT = "checkpoint", Executor.PYTHON, "checkpoint_us"  # segments recomputed
    OPERATION = "operation", Executor.PYTHON, "operation_us"  # calls, on the host, of single operations in a loop
    AWAITED = "awaited result", Executor.PYTHON, "await_us"  # calls, small results that the host waits for one by one
    GRADIENT_HOOK = "gradient hook", Executor.PYTHON, "gradient_hook_us"
    GATHER_HOOK = "gather hook", Executor.PYTHON, "gather_hook_us"
    RELEASE_HOOK = "release hook", Executor.PYTHON, "release_hook_us"
    UPLOAD_HOOK = "upload hook", Executor.PYTHON, "upload_hook_us"
    UNIT_HOOK = "unit hook", Executor.PYTHON, "unit_hook_us"
    LINK = "link", Executor.LINK, "link_gbs", _GIGA  # bytes
    NODE_LINK = "node link", Executor.LINK, "ring_gbs", _GIGA  # bytes
    COLLECTIVE = "collective", Executor.LINK, "collective_us"  # calls × ranks
    PINNED = "pinned", Executor.PCIE, "pinned_gbs", _GIGA  # bytes
    PAGEABLE = "pageable", Executor.PCIE, "pageable_gbs", _GIGA  # bytes
    AWAITED_PINNED = "pinned, awaited", Executor.PYTHON, "pinned_gbs", _GIGA  # bytes, copied while the host waits
    AWAITED_PAGEABLE = "pageable, awaited", Executor.PYTHON, "pageable_gbs", _GIGA  # bytes, likewise
    CPU_ADAM = "cpu adam", Executor.HOST, "cpu_adam_gbs", _GIGA  # bytes
    DRAM = "dram", Executor.HOST, "dram_gbs", _GIGA  # bytes
    FRESH = "fresh host memory", Executor.HOST, "fresh_gbs", _GIGA  # bytes
    READ = "disk read", Executor.DISK, "read_gbs", _GIGA  # bytes
    WRITE = "disk write", Executor.DISK, "write_gbs", _GIGA  # bytes
    SEGMENT = "segment", Executor.STALL, "segment_us"  # calls of cudaFree and cudaMalloc
    MAPPING = "mapping", Executor.STALL, "mapping_gbs", _GIGA  # bytes that they unmap and map
    PAGE = "page", Executor.STALL, "page_us"  # pages of expandable segments that they unmap and map

    def seconds(self, amount: int, rates: Rates) -> float:
        """Return the seconds that `amount` takes."""
        rate: float = getattr(rates, self.rate_name)
        return amount / (rate * self.unit) if self.unit else amount * rate / 1e6


@dataclass(frozen=True, slots=True)
class Work(Documented):
    """The formula of one piece of work: operations, bytes or calls on one rank, in one micro batch or one optimizer step.

    `ahead` marks work of the optimizer step that is issued before the host first waits for the device, so that it runs beside
    the end of the backward.
    """

    resource: Resource | Callable[[Any], Resource]
    phase: Phase
    ahead: bool | Callable[[Any], bool] = False

    def resource_of(self, facts: Any) -> Resource:
        """Return the resource that the work uses, given the facts."""
        return self.resource if isinstance(self.resource, Resource) else self.resource(facts)

    def is_ahead(self, facts: Any) -> bool:
        """Return whether the work is issued before the host first waits in the step, given the facts."""
        return self.ahead if isinstance(self.ahead, bool) else self.ahead(facts)


class WorkItem(NamedTuple):
    """An evaluated line: the amount of a resource, and seconds. Forward and backward are those of one micro batch.

    A tuple, because a search makes some twenty for each of its candidates.
    """

    name: str
    resource: Resource
    phase: Phase
    amount: int
    seconds: float
    formula: str = ""
    doc: str = ""
    source: str = ""
    ahead: bool = False


class WorkLedger(tuple[Work, ...]):
    """Lines in the order in which they are shown."""

    __slots__ = ()


class WorkBuilder:
    """Collects a module's lines: ``@lines.add(Resource.MATMUL, Phase.FORWARD)`` above each formula."""

    def __init__(self) -> None:
        self._lines: list[Work] = []

    def add(
        self,
        resource: Resource | Callable[[Any], Resource],
        *phases: Phase,
        ahead: bool | Callable[[Any], bool] = False,
    ) -> Callable[[Formula], Formula]:
        """Register the decorated formula as a line named after the function.

        A formula that holds in several phases becomes a line in each, whose name ends in the phase's.
        """

        def register(fn: Formula) -> Formula:
            for phase in phases:
                name = fn.__name__ if len(phases) == 1 else f"{fn.__name__}_{phase.value}"
                self._lines.append(Work(name, fn, resource, phase, ahead))
            return fn

        return register

    def ledger(self) -> WorkLedger:
        """Return the lines registered so far, in that order."""
        return WorkLedger(self._lines)


def work_items(ledger: Iterable[Work], facts: Any, rates: Rates) -> list[WorkItem]:
    """Evaluate every line of work that is not zero, without its derivation."""
    items = []
    for line in ledger:
        amount = line.fn(facts)
        if amount:
            resource = line.resource if type(line.resource) is Resource else line.resource_of(facts)
            ahead = line.ahead if type(line.ahead) is bool else line.is_ahead(facts)
            items.append(WorkItem(line.name, resource, line.phase, int(amount), resource.seconds(amount, rates), ahead=ahead))
    return items


def derived_work(ledger: Iterable[Work], facts: Any, rates: Rates) -> Iterator[WorkItem]:
    """Evaluate every line of work that is not zero, in the unit of its resource and in seconds, with its formula."""
    named = symbols(facts)
    for line in ledger:
        amount = line.fn(named)
        if amount:
            resource = line.resource_of(facts)
            seconds = resource.seconds(int(amount), rates)
            text, ahead = expression(amount), line.is_ahead(facts)
            yield WorkItem(line.name, resource, line.phase, int(amount), seconds, text, line.doc, line.source, ahead)
