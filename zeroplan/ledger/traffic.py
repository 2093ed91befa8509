"""Lines of work and traffic: operations, kernels and bytes moved, one formula each, in the ledger's form.

A memory line says how many bytes a buffer holds; a traffic line says how much of a resource one micro batch or one optimizer
step takes. Divided by the machine's rate for that resource it is a time. The same function gives the number, the ranking
and the derivation, as in :mod:`zeroplan.ledger.line`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from zeroplan.core.buffers import Phase
from zeroplan.core.rates import Rates
from zeroplan.ledger.derive import expression
from zeroplan.ledger.line import symbols


class Executor(StrEnum):
    """What a piece of work keeps busy. Work of different executors can run at the same time, where the engine lets it."""

    PYTHON = "python"  # the process that issues kernels
    GPU = "gpu"
    LINK = "link"  # between GPUs
    PCIE = "pcie"  # between a GPU and its host
    HOST = "host"  # the host's cores and memory
    DISK = "disk"
    STALL = "stall"  # the host waits for the driver, which waits for the GPU: nothing else goes on


class Resource(StrEnum):
    """What is used up, and in which unit it is counted."""

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
#: executor, the rate's field in Rates, and its unit: amount ÷ (rate × unit) for throughputs, amount × rate ÷ 10^6 for µs each.
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
    """What the resource keeps busy."""
    return _RATES[resource][0]


def rate_name(resource: Resource) -> str:
    """The field of :class:`~zeroplan.core.rates.Rates` that it is divided by."""
    return _RATES[resource][1]


def seconds_for(resource: Resource, amount: int, rates: Rates) -> float:
    """Seconds that so much of a resource takes."""
    _, name, unit = _RATES[resource]
    rate: float = getattr(rates, name)
    return amount / (rate * unit) if unit else amount * rate / _MICRO


@dataclass(frozen=True, slots=True)
class Work:
    """One formula: ``fn(facts)`` operations, bytes or calls on one rank, each micro batch or (`step`) each optimizer step.

    `ahead`: of a step's work, what is issued before the host first waits for the device, so beside the backward's end.
    """

    name: str
    resource: Resource | Callable[[Any], Resource]
    phase: Phase
    fn: Callable[[Any], int]
    ahead: bool | Callable[[Any], bool] = False

    @property
    def doc(self) -> str:
        """What it is: the first line of the formula's docstring."""
        return (self.fn.__doc__ or "").strip().split("\n")[0]

    @property
    def source(self) -> str:
        """Where the fact comes from."""
        for text in (self.fn.__doc__ or "").splitlines():
            if text.strip().startswith("Source:"):
                return text.strip().removeprefix("Source:").strip()
        return ""

    def resource_of(self, facts: Any) -> Resource:
        """What it uses, given the facts."""
        return self.resource if isinstance(self.resource, Resource) else self.resource(facts)

    def is_ahead(self, facts: Any) -> bool:
        """Whether it is issued before the step first waits, given the facts."""
        return self.ahead if isinstance(self.ahead, bool) else self.ahead(facts)


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A line evaluated: so much of a resource, for so many seconds. Backward and forward are those of one micro batch."""

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
        """What it keeps busy."""
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
        phase: Phase,
        *,
        ahead: bool | Callable[[Any], bool] = False,
    ) -> Callable[[Callable[[Any], int]], Callable[[Any], int]]:
        """Register the decorated formula as a line named after the function."""

        def register(fn: Callable[[Any], int]) -> Callable[[Any], int]:
            self._lines.append(Work(fn.__name__, resource, phase, fn, ahead))
            return fn

        return register

    def ledger(self) -> WorkLedger:
        """The lines registered so far, in that order."""
        return WorkLedger(self._lines)


def work_items(ledger: Iterable[Work], facts: Any, rates: Rates) -> list[WorkItem]:
    """Every line that is not zero, without derivations."""
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
