"""The distance by which the device falls behind the host in a micro batch of stage 3, module by module.

Note [Device lag]
    Freed parameters come back once the compute stream has passed their last use (coordinator.py, Note [Lag]). Two clocks say
    when that is: the host's, which each hook and each kernel issued takes on, and the device's, which starts a kernel no
    earlier than it is issued and takes what the module's products and its bytes take. Where a host's hooks take longer than
    the kernels, the device waits for them, except behind the head and the loss, whose logits keep it busy for tens of hooks.
    Where the kernels take longer it falls behind all through the forward: DeepSpeed's own bounds do not hold it. Its fetch
    events (__max_ongoing_fetch_events) are recorded on the gathers' stream, which waits for no computation.
    The clocks run at the rates of step times (core/rates.py), whose host is a fast one. One that is slowed down lets the
    device come closer, down to the few fetches that are always there: a run lies between the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.core.rates import Rates
from zeroplan.engines.compute_traffic import PASSES
from zeroplan.tape.expanded import ExpandedTape, Mark, Op

#: Kernels that a driver's queue takes before a launch waits for the device.
QUEUE = 1024

_MICRO, _GIGA, _TERA = 1e-6, 1e9, 1e12


@dataclass(frozen=True, slots=True)
class DeviceLag:
    """After how many fetches each block that a micro batch frees can be used again.

    Attributes:
        back: for each fetch, the number of the fetch at which blocks freed right after it are in the pool again.
        device_bound: whether the device needs more time for a micro batch than the host.
    """

    back: tuple[int, ...]
    device_bound: bool

    @property
    def furthest(self) -> int:
        """The most fetches by which the device is behind the host."""
        return max((back - at for at, back in enumerate(self.back)), default=0)


def device_lag_of(tape: ExpandedTape, tokens: int, rates: Rates, *, fp32: bool, unhooked: Sequence[bool]) -> DeviceLag:
    """Derive how far the device falls behind the host in one forward and backward of a tape.

    Args:
        tape: the expanded tape; each allocation is one kernel's output.
        tokens: rows of the products: micro batch times sequence.
        rates: of the machine.
        fp32: whether the products are.
        unhooked: the modules inside leaf modules, which fetch nothing of their own.
    """
    fetch, released = rates.gather_hook_us * _MICRO, rates.release_hook_us * _MICRO
    launch, engine = rates.launch_us * _MICRO, rates.autograd_us * _MICRO
    a_byte = PASSES / (rates.hbm_gbs * _GIGA)
    an_element = 2 * tokens / ((rates.fp32_tflops if fp32 else rates.matmul_tflops) * _TERA)
    forwards, backwards = ([one * an_element for one in found] for found in _multiplied(tape))
    alloc, enter, leave, arrive, passed, mark = Op.ALLOC, Op.ENTER, Op.EXIT, Op.BWD_ENTER, Op.BWD_EXIT, Op.MARK

    host = device = busy = 0.0
    backward = False
    depth = 0  # of modules that run, recomputed ones included
    issued: deque[float] = deque()  # when the device is done with each of the latest kernels
    begun: list[float] = []  # the host's clock at each fetch
    done: list[float] = []  # the device's when it has done all that was issued before a fetch
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        work = 0.0
        if op == alloc:
            host += engine if backward and not depth else launch
            work = a_byte * aux
        elif op in (enter, arrive):
            if not unhooked[arg]:
                host += fetch
                begun.append(host)
                done.append(device)
            if op == enter:
                depth += 1
                work = forwards[arg]
            else:
                depth = 0  # recomputation may stop inside its modules
                work = backwards[arg]
        elif op == leave:
            depth = max(0, depth - 1)
        elif op == passed:
            if not unhooked[arg]:
                host += released
        elif op == mark and arg == Mark.BACKWARD_BEGIN:
            backward = True
        if work:
            device = (device if device > host else host) + work
            busy += work
            issued.append(device)
            if len(issued) > QUEUE:
                host = max(host, issued.popleft())
    return DeviceLag(tuple(bisect_left(begun, time) for time in (*done[1:], device)), busy > host)


def _multiplied(tape: ExpandedTape) -> tuple[list[int], list[int]]:
    """Count, for each module, the elements of the matrices that its forward and its backward multiply with; trained ones count
    twice.

    An embedding looks rows up.
    """
    elements = [p.shape[0] * p.shape[1] if len(p.shape) == 2 else 0 for p in tape.params]
    owned = [() if module.type.endswith("Embedding") else module.params for module in tape.modules]
    forward = [sum(elements[p] for p in params) for params in owned]
    return forward, [sum(elements[p] * (1 + tape.params[p].trainable) for p in params) for params in owned]
