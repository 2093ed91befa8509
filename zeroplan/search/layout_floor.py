"""What the worst rank of a layout allocates at least, by arithmetic alone.

Note [Floor of a layout]
    The rank that needs the most needs at least as much as the mean rank, and means follow from counts: the ranks of a pipeline
    have all blocks between them, and those of tensor and expert parallelism a part each. It needs at least as much as any one
    stage's rank, too: the first has the most micro batches in flight. Two moments are looked at.

    Within a step, after the first backward: masters and optimizer states; on pipeline stages, and wherever parameters are not
    resharded, whole parameters in 16 bits, of several chunks those that are gathered at a time; where micro batches add up,
    whole gradients in fp32; and of each micro batch in flight what its blocks keep: the input of each, which both its first
    norm and a checkpoint keep, and unless it is recomputed what the gradients of its matrices and attention need
    (:func:`_kept_within`). With 1F1B rank r of p has p − r in flight, if there are more micro batches than that, and with other
    schedules no fewer in the mean. Where parameters are resharded, one block's are gathered.

    In the optimizer's step: masters, states and the reduced gradients.

    Nothing else is counted: neither other activations, nor buffers of collectives, nor memory outside torch. So a layout whose
    floor exceeds the card cannot fit, and need not be simulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zeroplan.core.expert_parallel import is_expert
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.pipeline import Stage, stages_of
from zeroplan.core.pipeline_order import GATHERED_CHUNKS
from zeroplan.core.tensor_parallel import MIXTURES, PLANS
from zeroplan.core.workload import ChunkedHead, DType, GradientCheckpointing, Precision
from zeroplan.engines.case import Case
from zeroplan.ledger.work import head_width
from zeroplan.models.facts import experts_a_token, spec_facts
from zeroplan.models.spec import ModelSpec, SpecUnit
from zeroplan.run.ask import Ask
from zeroplan.search.layout_recomputation import recomputed

#: Techniques with which a block that recomputes nothing keeps all that :func:`_kept_within` counts.
_KEEPING = (ChunkedHead, GradientCheckpointing)


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
        self._whole = _sum(by_block.values())
        eager = all(isinstance(one, _KEEPING) for one in work.techniques)
        self._within = {policy: _kept_within(case.spec, policy) if eager else [] for policy in ("", "selective")}
        half = work.numerics.precision in (Precision.PURE, Precision.HALF_AUTOCAST)
        self._master = work.numerics.dtype.bytes if half else DType.FP32.bytes
        optimizer = find_optimizer(work.numerics.optimizer)
        states = min(optimizer.bytes_per_element(0.0), optimizer.bytes_per_element(1.0))
        self._states = self._master + states * self._master // DType.FP32.bytes

    def of(self, request: Ask) -> int:
        """Return the floor of a layout, in bytes, by the degrees, stage, accumulation and checkpointing of a request."""
        blocks, pp = len(self._blocks), request.pp
        stages = stages_of(blocks, pp) if pp > 1 else (Stage(0, 1, 0, blocks),)
        most = (request.grad_accum or 1) - 1
        kept = [self._kept(request, one, min(pp - one.index, most) if pp > 1 else 1) for one in stages]
        found = self._rank(request, self._whole, pp, sum(kept) / pp)
        if request.vpp == 1 and pp > 1:
            owned = ((_sum(self._blocks[one.first : one.end]), held) for one, held in zip(stages, kept, strict=True))
            found = max(found, *(self._rank(request, one, 1, held) for one, held in owned))
        return int(found)

    def _rank(self, request: Ask, whole: _Held, stages: int, kept: float) -> float:
        """Return what a rank needs in the mean of so many stages that have `whole` between them, and `kept` activations."""
        ranks = request.gpus * request.nodes // request.dp_replicate * stages // request.pp
        total, part = whole.dense + whole.experts, whole.part(request) / stages
        width = self._work.numerics.dtype.bytes
        within = self._states * total / ranks + kept
        if request.stage != 3:
            within += width * part * min(request.vpp, GATHERED_CHUNKS) / request.vpp
        else:
            within += width * max((block.part(request) for block in self._blocks), default=0.0)
        if request.pp > 1 or (request.grad_accum or 1) > 1:
            rounds = (request.grad_accum or 1) // request.pp
            within += self._master * part / (request.vpp if rounds < 2 else 1)  # of one round, chunks are reduced one by one
        return max(within, (self._states + self._master) * total / ranks)

    def interleaved_inputs(self, request: Ask) -> int:
        """Return the bytes of blocks' inputs that the first rank of an interleaved schedule keeps more than with 1F1B."""
        pp, vpp = request.pp, request.vpp
        more = ((vpp - 1) * pp + 2 * (pp - 1)) / vpp - pp
        tokens = self._work.batch.rows * (self._work.batch.seq_len or 0) / (request.cp * (request.tp if request.sp else 1))
        return int(max(0.0, more) * (len(self._blocks) // pp) * tokens * self._hidden * self._work.numerics.dtype.bytes)

    def _kept(self, request: Ask, stage: Stage, micro_batches: int) -> float:
        """Bytes that the blocks of a stage keep of so many micro batches."""
        tokens = self._work.batch.rows * (self._work.batch.seq_len or 0) / request.cp
        inputs = self._hidden * (stage.end - stage.first) / (request.tp if request.sp else 1)
        within = sum(self._within.get(recomputed(request), [])[stage.first : stage.end]) / request.tp
        return micro_batches * tokens * (inputs + within) * self._work.numerics.dtype.bytes


def _sum(found: Iterable[_Held]) -> _Held:
    every = list(found)
    return _Held(sum(one.dense for one in every), sum(one.experts for one in every))


def _kept_within(spec: ModelSpec, policy: str) -> list[float]:
    """Return the elements that each block keeps for each token beside its input, at least; zeros for blocks of other kinds than
    the tensor-parallel plans know, which are attention and gated MLPs.

    Attention keeps queries, keys, values and its output, the second norm its input, and an MLP the outputs of gate and up and
    the product that its last matrix takes; experts also the tokens that they are sent. Selective checkpoints keep of these what
    products and attention made, and of attention's and the MLP's last matrix what they made, too.
    """
    if spec.model_type not in (*PLANS, *MIXTURES):
        return [0.0] * sum(unit.count for unit in spec.units if unit.block)
    facts = spec_facts(spec)
    width, hidden = head_width(spec.config, facts.head_dim or 0), facts.hidden_size or 0
    attention = 2 * ((facts.heads or 0) + (facts.kv_heads or 0)) * width + hidden
    sent = experts_a_token(spec.config) or 0
    kept = 2 if policy else 3
    return [attention + _kept_in_mlp(unit, sent, hidden, kept) for unit in spec.units if unit.block for _ in range(unit.count)]


def _kept_in_mlp(unit: SpecUnit, sent: int, hidden: int, kept: int) -> int:
    """Return what a block's MLPs keep, `kept` times their channels."""
    found = 0
    for tensor in unit.tensors:
        if tensor.name.endswith("gate_up_proj"):
            found += sent * (kept * tensor.shape[-2] // 2 + hidden)
        elif tensor.name.endswith("gate_proj.weight"):
            found += kept * tensor.shape[0]
    return found
