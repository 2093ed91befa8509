"""Lines of work and traffic: operations, kernels and bytes moved, with one formula each, as in :mod:`zeroplan.ledger.line`.

A line of memory gives the bytes of a buffer. A line of work gives the amount of a resource that one micro batch or one
optimizer step uses. Divided by the machine's rate for that resource it is a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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


class Resource(StrEnum):
    """Resources that a piece of work uses. The comment names the unit of the amount."""

    MATMUL = "matmul"  # operations
    FP32_MATMUL = "fp32 matmul"  # operations
    ATTENTION = "attention"  # operations
    HBM = "hbm"  # bytes
    KERNEL = "kernel"  # calls, on the GPU
    LAUNCH = "launch"  # calls, on the host, from Python
    AUTOGRAD = "autograd"  # calls, on the host, from the backward's thread
    CHECKPOINT = "checkpoint"  # segments recomputed
    OPERATION = "operation"  # calls, on the host, of single operations in a loop
    AWAITED = "awaited result"  # calls, small results that the host waits for one by one
    GRADIENT_HOOK = "gradient hook"
    GATHER_HOOK = "gather hook"
    RELEASE_HOOK = "release hook"
    UPLOAD_HOOK = "upload hook"
    UNIT_HOOK = "unit hook"
    LINK = "link"  # bytes
    NODE_LINK = "node link"  # bytes
    COLLECTIVE = "collective"  # calls × ranks
    PINNED = "pinned"  # bytes
    PAGEABLE = "pageable"  # bytes
    AWAITED_PINNED = "pinned, awaited"  # bytes, copied while the host waits
    AWAITED_PAGEABLE = "pageable, awaited"  # bytes, likewise
    CPU_ADAM = "cpu adam"  # bytes
    DRAM = "dram"  # bytes
    FRESH = "fresh host memory"  # bytes
    READ = "disk read"  # bytes
    WRITE = "disk write"  # bytes
    SEGMENT = "segment"  # calls of cudaFree and cudaMalloc
    MAPPING = "mapping"  # bytes that they unmap and map
    PAGE = "page"  # pages of expandable segments that they unmap and map


_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e6
#: The executor, the field of Rates, and its unit. Seconds are amount ÷ (rate × unit), or for unit 0 amount × rate ÷ 10^6.
_RATES: dict[Resource, tuple[Executor, str, float]] = {
    Resource.MATMUL: (Executor.GPU, "matmul_tflops", _TERA),
    Resource.FP32_MATMUL: (Executor.GPU, "fp32_tflops", _TERA),
    Resource.ATTENTION: (Executor.GPU, "attention_tflops", _TERA),
    Resource.HBM: (Executor.GPU, "hbm_gbs", _GIGA),
    Resource.KERNEL: (Executor.GPU, "kernel_us", 0),
    Resource.LAUNCH: (Executor.PYTHON, "launch_us", 0),
    Resource.AUTOGRAD: (Executor.PYTHON, "autograd_us", 0),
    Resource.CHECKPOINT: (Executor.PYTHON, "checkpoint_us", 0),
    Resource.OPERATION: (Executor.PYTHON, "operation_us", 0),
    Resource.AWAITED: (Executor.PYTHON, "await_us", 0),
    Resource.GRADIENT_HOOK: (Executor.PYTHON, "gradient_hook_us", 0),
    Resource.GATHER_HOOK: (Executor.PYTHON, "gather_hook_us", 0),
    Resource.RELEASE_HOOK: (Executor.PYTHON, "release_hook_us", 0),
    Resource.UPLOAD_HOOK: (Executor.PYTHON, "upload_hook_us", 0),
    Resource.UNIT_HOOK: (Executor.PYTHON, "unit_hook_us", 0),
    Resource.LINK: (Executor.LINK, "link_gbs", _GIGA),
    Resource.NODE_LINK: (Executor.LINK, "node_gbs", _GIGA),
    Resource.COLLECTIVE: (Executor.LINK, "collective_us", 0),
    Resource.PINNED: (Executor.PCIE, "pinned_gbs", _GIGA),
    Resource.PAGEABLE: (Executor.PCIE, "pageable_gbs", _GIGA),
    Resource.AWAITED_PINNED: (Executor.PYTHON, "pinned_gbs", _GIGA),
    Resource.AWAITED_PAGEABLE: (Executor.PYTHON, "pageable_gbs", _GIGA),
    Resource.CPU_ADAM: (Executor.HOST, "cpu_adam_gbs", _GIGA),
    Resource.DRAM: (Executor.HOST, "dram_gbs", _GIGA),
    Resource.FRESH: (Executor.HOST, "fresh_gbs", _GIGA),
    Resource.READ: (Executor.DISK, "read_gbs", _GIGA),
    Resource.WRITE: (Executor.DISK, "write_gbs", _GIGA),
    Resource.SEGMENT: (Executor.STALL, "segment_us", 0),
    Resource.MAPPING: (Executor.STALL, "mapping_gbs", _GIGA),
    Resource.PAGE: (Executor.STALL, "page_us", 0),
}


def executor_of(resource: Resource) -> Executor:
    """Return the executor that the resource belongs to."""
    return _RATES[resource][0]


def rate_name(resource: Resource) -> str:
    """Return the field of :class:`~zeroplan.core.rates.Rates` with the resource's rate."""
    return _RATES[resource][1]


def seconds_for(resource: Resource, amount: int, rates: Rates) -> float:
    """Seconds that `amount` of a resource takes, in the resource's unit."""
    _, name, unit = _RATES[resource]
    rate: float = getattr(rates, name)
    return amount / (rate * unit) if unit else amount * rate / _MICRO


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


@dataclass(frozen=True, slots=True)
class WorkItem:
    """An evaluated line: the amount of a resource, and seconds. Forward and backward are those of one micro batch."""

    name: str
    resource: Resource
    phase: Phase
    amount: int
    seconds: float
    formula: str = ""
    doc: str = ""
    source: str = ""
    ahead: bool = False

    @property
    def executor(self) -> Executor:
        """The executor that carries the work out."""
        return executor_of(self.resource)


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
    """Every line of work that is not zero, without its derivation."""
    items = []
    for line in ledger:
        amount = line.fn(facts)
        if amount:
            resource = line.resource if type(line.resource) is Resource else line.resource_of(facts)
            ahead = line.ahead if type(line.ahead) is bool else line.is_ahead(facts)
            seconds = seconds_for(resource, amount, rates)
            items.append(WorkItem(line.name, resource, line.phase, int(amount), seconds, ahead=ahead))
    return items


def derived_work(ledger: Iterable[Work], facts: Any, rates: Rates) -> Iterator[WorkItem]:
    """Every line of work that is not zero, in the unit of its resource and in seconds, with its formula."""
    named = symbols(facts)
    for line in ledger:
        amount = line.fn(named)
        if amount:
            resource = line.resource_of(facts)
            seconds = seconds_for(resource, int(amount), rates)
            text, ahead = expression(amount), line.is_ahead(facts)
            yield WorkItem(line.name, resource, line.phase, int(amount), seconds, text, line.doc, line.source, ahead)
