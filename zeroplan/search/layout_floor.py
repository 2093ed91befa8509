"""What the worst rank of a layout allocates at least, by arithmetic alone.

Note [Floor of a layout]
    The rank that needs the most needs at least as much as the mean rank, and means follow from counts: the ranks of a pipeline
    have all blocks between them, and those of tensor and expert parallelism a part each. Two moments are looked at.

    Within a step, after the first backward: masters and optimizer states; on pipeline stages, and wherever parameters are not
    resharded, whole parameters in 16 bits, of several chunks those that are gathered at a time; where micro batches add up,
    whole gradients in fp32; and of each micro batch in flight the input of each block, which both its first norm and a
    checkpoint keep. With 1F1B rank r of p has p − r in flight, if there are more micro batches than that, and with other
    schedules no fewer. Where parameters are resharded, one block's are gathered.

    In the optimizer's step: masters, states and the reduced gradients.

    Nothing else is counted: neither activations within blocks, nor buffers of collectives, nor memory outside torch. So a
    layout whose floor exceeds the card cannot fit, and need not be simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.expert_parallel import is_expert
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.pipeline import stages_of
from zeroplan.core.pipeline_order import GATHERED_CHUNKS
from zeroplan.core.workload import DType, Precision
from zeroplan.engines.case import Case
from zeroplan.run.ask import Ask

#: What a block keeps beside its input, in inputs: 32 bytes of 34.
_WITHIN = 16


@dataclass(frozen=True, slots=True)
class _Held:
    """Elements that ranks share by their degrees: dense ones over tp, experts over ep and etp, or over tp without ep."""

    dense: int = 0
    experts: int = 0

    def part(self, request: Ask) -> float:
        return self.dense / request.tp + self.experts / (request.ep * request.etp if request.ep > 1 else request.tp)


class LayoutFloors:
    """The floors of one model and workload on any ranks. See Note [Floor of a layout].

    Args:
        case: the run under data parallelism alone.
    """

    def __init__(self, case: Case) -> None:
        work, parameters = case.workload, case.spec.parameters
        self._work = work
        self._hidden = int(case.spec.config.get("hidden_size") or 0)
        by_block: dict[str, _Held] = {}
        for name, block, count in zip(parameters.names, parameters.blocks, parameters.numel, strict=True):
            held = by_block.get(block, _Held())
            shared = is_expert(name)
            by_block[block] = _Held(held.dense + (0 if shared else count), held.experts + (count if shared else 0))
        self._blocks = [held for block, held in by_block.items() if block]
        self._whole = _Held(sum(held.dense for held in by_block.values()), sum(held.experts for held in by_block.values()))
        half = work.numerics.precision in (Precision.PURE, Precision.HALF_AUTOCAST)
        self._master = work.numerics.dtype.bytes if half else DType.FP32.bytes
        optimizer = find_optimizer(work.numerics.optimizer)
        states = min(optimizer.bytes_per_element(0.0), optimizer.bytes_per_element(1.0))
        self._states = self._master + states * self._master // DType.FP32.bytes

    def of(self, request: Ask) -> int:
        """Return the floor of a layout, in bytes, by the degrees, stage, accumulation and checkpointing of a request."""
        ranks = request.gpus * request.nodes // request.dp_replicate
        total, part = self._whole.dense + self._whole.experts, self._whole.part(request) / request.pp
        width = self._work.numerics.dtype.bytes
        within = self._states * total / ranks + self._inputs(request)
        if request.stage != 3:
            within += width * part * min(request.vpp, GATHERED_CHUNKS) / request.vpp
        else:
            within += width * max((block.part(request) for block in self._blocks), default=0.0)
        if request.pp > 1 or (request.grad_accum or 1) > 1:
            rounds = (request.grad_accum or 1) // request.pp
            within += self._master * part / (request.vpp if rounds < 2 else 1)  # of one round, chunks are reduced one by one
        return int(max(within, (self._states + self._master) * total / ranks))

    def exceeds_likely(self, request: Ask, usable: int) -> bool:
        """Return whether a layout probably exceeds the card: with the 34 bytes for each token and channel that a block keeps
        which is not recomputed, its input included (Korthikanti et al. 2022, equation 2), on the mean rank.
        """
        within = (
            0.0
            if request.value("gradient_checkpointing")
            else _WITHIN * self._inputs(request) / (1 if request.sp else request.tp)
        )
        return self.of(request) + within > usable

    def interleaved_inputs(self, request: Ask) -> int:
        """Return the bytes of blocks' inputs that the first rank of an interleaved schedule keeps more than with 1F1B."""
        pp, vpp = request.pp, request.vpp
        more = ((vpp - 1) * pp + 2 * (pp - 1)) / vpp - pp
        tokens = self._work.batch.rows * (self._work.batch.seq_len or 0) / (request.cp * (request.tp if request.sp else 1))
        return int(max(0.0, more) * (len(self._blocks) // pp) * tokens * self._hidden * self._work.numerics.dtype.bytes)

    def _inputs(self, request: Ask) -> float:
        """Bytes of the blocks' inputs that a rank keeps in the mean."""
        tokens = self._work.batch.rows * (self._work.batch.seq_len or 0) / (request.cp * (request.tp if request.sp else 1))
        blocks, pp = len(self._blocks), request.pp
        if pp > 1:
            most = (request.grad_accum or 1) - 1
            kept = sum((one.end - one.first) * min(pp - one.index, most) for one in stages_of(blocks, pp)) / pp
        else:
            kept = blocks
        return kept * tokens * self._hidden * self._work.numerics.dtype.bytes
