"""What torch's own parallelism has the host do for a block, beside issuing the kernels that a tape without ranks counts.

Note [DTensor's dispatch]
    Matrices and norms of tensor-parallel ranks are DTensors, and eager Python dispatches each of their operations: of a linear
    layer views, transposes and products, of a norm its elementwise ones. A small model's step waits for it. What
    ``torch.compile`` traces dispatches nothing. ``tests/search/test_layout_host.py`` counts these operations on torch.

Note [Ring's kernels]
    Attention of torch's ``context_parallel`` runs once for each rank's keys, and merges outputs and gradients in fp32. On tapes
    of Llama 3.2 1B on one, two and four ranks there were so many kernels a block and so many bytes a token and channel of its
    heads, once and again for each further rank.
"""

from __future__ import annotations

from dataclasses import replace

from zeroplan.core.buffers import Phase
from zeroplan.core.rates import Rates
from zeroplan.core.tensor_parallel import PLANS, TensorPlan, tensor_plan
from zeroplan.engines.case import Case
from zeroplan.engines.traffic import Hooks
from zeroplan.ledger.work import Counts, matrices
from zeroplan.models.facts import spec_facts

#: Parameters whose hooks take as long as what FSDP2 does for a unit, whatever its parameters: experts that ranks share are one.
_OWN_UNIT = 6
#: Operations on DTensors in the forward and in the backward. See Note [DTensor's dispatch].
LINEAR, NORM = (4, 8), (9, 19)
#: Calls of c10d in a block's forward and backward, waits included, beside FSDP2's own, as torch 2.13 dispatches them. The host
#: takes as long for one as for so many kernels of the forward (52 of 42 µs, two H200s), and as for so many for a parameter in
#: the optimizer's step and before it (CPU time).
_TP_CALLS, _SP_CALLS, _EP_CALLS = (3, 13), (9, 16), (6, 4)
_CALL, _STEP = 1.25, 5.0
#: Kernels and bytes in the forward and in the backward, at once and for each further rank. See Note [Ring's kernels].
_RING_KERNELS, _RING_BYTES = ((5, 16), (22, 9)), ((7, 21), (44, 20))


def dispatch_seconds(case: Case, phase: Phase, rates: Rates, again: int) -> float:
    """Return the host's seconds for a mean block's dispatches of DTensors in a pass of one micro batch.

    Args:
        case: the run.
        phase: forward or backward.
        rates: of the machine.
        again: how often the backward runs the forward once more: 0 or 1.
    """
    if case.layout.tp == 1:
        return 0.0
    tensors = _block_tensors(case)
    norms = sum("norm" in name.rpartition("layers.")[2] for name in tensors)
    linears = _shared_linears(case, tensors)
    forward, backward = (LINEAR[at] * linears + NORM[at] * norms for at in (0, 1))
    operations = forward if phase is Phase.FORWARD else backward + again * forward
    return rates.dispatch_us * operations / _blocks(case) / 1e6


def call_seconds(case: Case, phase: Phase, rates: Rates, again: int) -> float:
    """Return the host's seconds in which a block of tensor- or expert-parallel ranks calls and awaits collectives in a pass."""
    layout = case.layout
    calls = [0, 0]
    for shared, counted in ((layout.tp > 1, _SP_CALLS if layout.sp else _TP_CALLS), (layout.ep > 1, _EP_CALLS)):
        calls = [one + other * shared for one, other in zip(calls, counted, strict=True)]
    made = calls[0] if phase is Phase.FORWARD else calls[1] + again * calls[0]
    return _CALL * rates.launch_us * made / 1e6


def step_seconds(case: Case, rates: Rates, hooks: Hooks) -> float:
    """Return the host's seconds for clipping and updating a rank's DTensors, which FSDP2's are."""
    return _STEP * rates.launch_us * len(case.spec.parameters.names) / 1e6 if hooks is Hooks.PARAMETERS else 0.0


def hook_seconds(case: Case, counts: Counts, phase: Phase, rates: Rates, hooks: Hooks) -> float:
    """Return the host's seconds for a mean block's hooks in a pass of one micro batch; arguments as above."""
    if hooks is Hooks.MODULES:
        passed = rates.gather_hook_us * counts.recomputed_modules + rates.release_hook_us * counts.backward_modules
        micros = rates.gather_hook_us * counts.forward_modules if phase is Phase.FORWARD else passed
    elif hooks is Hooks.GRADIENTS:
        micros = rates.gradient_hook_us * len(_block_tensors(case)) if phase is Phase.BACKWARD else 0.0
    else:
        own = _OWN_UNIT * _blocks(case) if case.layout.ep > 1 else 0
        micros = rates.unit_hook_us * (len(_block_tensors(case)) + own) if hooks is Hooks.PARAMETERS else 0.0
    return micros / _blocks(case) / 1e6


def _block_tensors(case: Case) -> list[str]:
    return [name for name, block in zip(case.spec.parameters.names, case.spec.parameters.blocks, strict=True) if block]


def _blocks(case: Case) -> int:
    return case.spec.parameters.block_count or 1


def _plan(case: Case) -> TensorPlan | None:
    """Return how tensor-parallel ranks share a block's matrices; None where no plan is known of the model."""
    kind = str(case.spec.config.get("model_type") or "")
    return tensor_plan(kind) if kind in PLANS else None


def _shared_linears(case: Case, tensors: list[str]) -> int:
    """Return the linear layers of all blocks whose matrices are DTensors."""
    plan = _plan(case)
    ends = (*plan.columns, *plan.rows) if plan is not None else ("_proj",)
    return sum(name.removesuffix(".weight").endswith(ends) for name in tensors if name.endswith(".weight"))


def input_sums(case: Case) -> int:
    """Return how many all-reduces of a block's backward sum the gradients of inputs: each column-wise layer has its own.

    Source: torch/distributed/tensor/parallel/style.py, ColwiseParallel
    """
    plan = _plan(case)
    return len(plan.columns) if plan is not None else 2


def with_ring(counts: Counts, case: Case) -> Counts:
    """Return the counts of a rank of a ring, given those of as many tokens without one. See Note [Ring's kernels]."""
    cp = case.layout.cp
    if cp == 1:
        return counts
    blocks = spec_facts(case.spec).layers or 0
    batch = case.workload.batch
    written = matrices(case.spec).attention // case.layout.tp * batch.rows * (batch.seq_len or 0) // cp
    kernels = [blocks * (once + more * (cp - 1)) for once, more in _RING_KERNELS]
    size = [written * (once + more * (cp - 1)) for once, more in _RING_BYTES]
    again = 1 if case.workload.gradient_checkpointing else 0
    return replace(
        counts,
        forward_kernels=counts.forward_kernels + kernels[0],
        backward_kernels=counts.backward_kernels + kernels[1] + again * kernels[0],
        recomputed_kernels=counts.recomputed_kernels + again * kernels[0],
        forward_written=counts.forward_written + size[0],
        backward_written=counts.backward_written + size[1] + again * size[0],
    )
