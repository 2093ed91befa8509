"""The forward of an evaluation, laid beside a training's tape."""

from __future__ import annotations

from dataclasses import replace

from zeroplan.core.errors import BadInput
from zeroplan.core.evaluation import Evaluation
from zeroplan.core.workload import ChunkedHead, Precision
from zeroplan.engines.base import Case
from zeroplan.tape.chunked_head import with_chunked_forward
from zeroplan.tape.expanded import EvaluationTape, ExpandedTape, Kind, Op
from zeroplan.tape.options import evaluation_options
from zeroplan.tape.sizes import KernelDevice
from zeroplan.tapes import lookup, tape_for

_FP32 = 4


def evaluation_tape(case: Case, tape: ExpandedTape, *, trace: bool) -> EvaluationTape | None:
    """Return the forward of the case's evaluation; None where it is not known: without a tape, or on other modules.

    Args:
        case: whose evaluation.
        tape: of the training, whose modules the evaluation runs.
        trace: trace it where it is neither shipped nor cached.
    """
    work = case.workload
    evaluation = work.technique(Evaluation)
    if evaluation is None or max(case.layout.pp, case.layout.cp, case.layout.ulysses) > 1 or work.batch.images:
        return None
    options = evaluation_options(work, case.parallel)
    stored = lookup(case.spec, options)
    if stored is None and trace:
        try:
            stored = tape_for(case.spec, options, work)
        except Exception:  # the model's own code runs here; the plan says that the evaluation is in no figure
            stored = None
    if stored is None:
        return None
    rows = evaluation.batch * (2 if work.batch.pairs else 1)
    seq = (work.batch.seq_len or 1) // options.split_tokens
    try:
        forward = stored.expand(rows, seq, work.lora_rank, device=KernelDevice.of(case.cluster.gpu))
    except BadInput:  # traced for other numbers
        return None
    if [module.name for module in forward.modules] != [module.name for module in tape.modules]:
        return None
    logits = _logits(forward) if evaluation.kept else 0
    if evaluation.kept and not logits:
        return None
    if work.has(ChunkedHead):
        forward = with_chunked_forward(forward, batch=rows, seq_len=seq, share=work.batch.labelled_share)
    casts = evaluation.casts and work.numerics.precision is not Precision.PURE
    returned = logits * _FP32 // work.numerics.dtype.bytes if casts else logits
    ranks = case.layout.dp
    return EvaluationTape(
        forward=replace(forward, evaluation=None),
        logits=logits,
        returned=returned,
        gathered=returned * ranks if ranks > 1 else 0,
        batches=max(1, evaluation.kept),
    )


def _logits(tape: ExpandedTape) -> int:
    """Bytes of the logits as the head makes them; 0 for a model without a vocabulary's head."""
    kinds = zip(tape.op, tape.aux, tape.kind, strict=True)
    return next((size for op, size, kind in kinds if op == Op.ALLOC and kind == Kind.LOGITS), 0)
