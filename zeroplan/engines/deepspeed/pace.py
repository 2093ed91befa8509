"""How far the device is behind the host in a micro batch of stage 3, module by module.

Note [Pace]
    Freed parameters come back once the compute stream has passed their last use (coordinator.py, Note [Lag]). Two clocks say
    when that is: the host's, which each hook and each kernel issued takes on, and the device's, which starts a kernel no
    earlier than it is issued and takes what the module's products and its bytes take. Where a host's hooks take longer than
    the kernels, the device waits for them, except behind the head and the loss, whose logits keep it busy for tens of hooks.
    Where the kernels take longer it falls behind all through the forward: DeepSpeed's own bounds do not hold it. Its fetch
    events (co, __max_ongoing_fetch_events) are recorded on the gathers' stream, which waits for no computation.
    The clocks run at the rates of step times (core/rates.py), whose host is a fast one. One that is slowed down lets the
    device come closer, down to the few fetches that are always there: a run lies between the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.core.rates import Rates
from zeroplan.core.tape import Mark, Op, Stream

#: Each byte that a kernel writes was read about twice (as in compute_traffic.py: two operands, one result).
_PASSES = 3

#: Kernels that a driver's queue takes before a launch waits for the device.
QUEUE = 1024

_MICRO, _GIGA, _TERA = 1e-6, 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Pace:
    """When what is freed in a micro batch can be used again.

    Attributes:
        back: by fetch, the fetch at which the host meets what is freed after it and before the next.
        device_bound: whether the device needs more time for a micro batch than the host.
    """

    back: tuple[int, ...]
    device_bound: bool

    @property
    def furthest(self) -> int:
        """The most fetches that the device is behind."""
        return max((back - at for at, back in enumerate(self.back)), default=0)


def pace_of(stream: Stream, tokens: int, rates: Rates, unhooked: Sequence[bool]) -> Pace:
    """The pace of a tape's forward and backward.

    Args:
        stream: the expanded tape; each allocation is one kernel's output.
        tokens: rows of the products: micro batch times sequence.
        rates: of the machine.
        unhooked: the modules inside leaf modules, which fetch nothing of their own.
    """
    host = device = busy = 0.0
    backward = False
    running: list[int] = []
    issued: deque[float] = deque()  # when the device is done with each of the latest kernels
    begun: list[float] = []  # the host's clock at each fetch
    done: list[float] = []  # the device's when it has done all that was issued before a fetch
    for op, arg, aux in zip(stream.op, stream.arg, stream.aux, strict=True):
        work = 0.0
        if op == Op.ALLOC:
            host += (rates.autograd_us if backward and not running else rates.launch_us) * _MICRO
            work = _PASSES * aux / (rates.hbm_gbs * _GIGA)
        elif op in (Op.ENTER, Op.BWD_ENTER):
            if not unhooked[arg]:
                host += rates.gather_hook_us * _MICRO
                begun.append(host)
                done.append(device)
            work = 2 * _multiplied(stream, arg, backward=op == Op.BWD_ENTER) * tokens / (rates.matmul_tflops * _TERA)
            if op == Op.ENTER:
                running.append(arg)
            else:
                running.clear()  # recomputation may stop inside its modules
        elif op == Op.EXIT and running:
            running.pop()
        elif op == Op.BWD_EXIT:
            host += 0.0 if unhooked[arg] else rates.release_hook_us * _MICRO
        elif op == Op.MARK:
            backward = backward or arg == Mark.BACKWARD_BEGIN
        if work:
            device = max(device, host) + work
            busy += work
            issued.append(device)
            if len(issued) > QUEUE:
                host = max(host, issued.popleft())
    return Pace(tuple(bisect_left(begun, time) for time in (*done[1:], device)), busy > host)


def _multiplied(stream: Stream, module: int, *, backward: bool) -> int:
    """Elements of the matrices that a module multiplies with, twice in the backward of those that are trained.

    An embedding looks rows up.
    """
    owner = stream.modules[module]
    if owner.type.endswith("Embedding"):
        return 0
    matrices = (stream.params[p] for p in owner.params if len(stream.params[p].shape) == 2)
    return sum(p.shape[0] * p.shape[1] * (1 + (backward and p.trainable)) for p in matrices)
