"""An evaluation between steps: its forward counts in the peak, the logits that it keeps are joined, and no backward follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.workloads import flat_workload
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.evaluation import Evaluation
from zeroplan.core.sizes import MIB
from zeroplan.core.workload import Precision
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.spec import ModelSpec, SpecUnit, Tensor
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.simulated import simulated_plan
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import EvaluationTape, ExpandedTape, Kind, Mark, Op, TapeModule, TapeParam

SHAPE = (1024, 1024)
SAVED, PASSED, LOGITS = 8 * MIB, 40 * MIB, 16 * MIB
ENGINES = (("ddp", 0), ("deepspeed", 1), ("deepspeed", 3), ("fsdp", 3), ("fsdp2", 3))


def stream(*, training: bool) -> ExpandedTape:
    """Two layers; the training's keep `SAVED` each, the evaluation's pass `PASSED` on, one at a time."""
    params = tuple(TapeParam(f"layers.{i}.weight", SHAPE, True, 4) for i in range(2))
    modules = (TapeModule("", "Net", -1), *(TapeModule(f"layers.{i}", "Linear", 0, (i,)) for i in range(2)))
    rows: list[tuple[int, int, int, int, int]] = [(Op.MARK, Mark.FORWARD_BEGIN, 0, 0, -1), (Op.ENTER, 0, 0, 0, -1)]
    for i in range(2):
        rows.append((Op.ENTER, i + 1, 0, 0, -1))
        rows.append((Op.ALLOC, i, SAVED if training else PASSED, Kind.SAVED if training else Kind.TEMP, i + 1))
        rows += [] if training else [(Op.FREE, i, 0, 0, -1)]
        rows.append((Op.EXIT, i + 1, 0, 0, -1))
    rows += [(Op.EXIT, 0, 0, 0, -1), (Op.MARK, Mark.FORWARD_END, 0, 0, -1), (Op.MARK, Mark.BACKWARD_BEGIN, 0, 0, -1)]
    for i in reversed(range(2)) if training else ():
        rows.append((Op.BWD_ENTER, i + 1, 0, 0, -1))
        rows.append((Op.ALLOC, 2 + i, 4 * 1024 * 1024, Kind.GRAD, i + 1))
        rows += [(Op.FREE, i, 0, 0, -1), (Op.GRAD, i, 2 + i, 0, -1), (Op.BWD_EXIT, i + 1, 0, 0, -1)]
    rows.append((Op.MARK, Mark.BACKWARD_END, 0, 0, -1))
    return ExpandedTape(modules, params).with_events(rows)


def phases(engine: str, stage: int, evaluation: EvaluationTape | None, *, gpus: int = 2) -> dict[str, int]:
    work = flat_workload(seq_len=8, precision=Precision.FP32, evaluation=None if evaluation is None else Evaluation(8))
    spec = ModelSpec("net", (SpecUnit("", tuple(Tensor(f"layers.{i}.weight", SHAPE) for i in range(2))),), "test")
    case = Case(spec, work, Cluster(gpus=gpus), ZeroConfig.of(stage))
    one = find_engine(engine)
    tape = replace(stream(training=True), evaluation=evaluation)
    plan = simulated_plan(formula_plan(one, case), one, case, tape).plan
    return plan.gpu.phases | {"peak": plan.gpu.peak_allocated, "live": plan.gpu.live_after_step}


@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_its_forward_stands_on_what_a_step_leaves_and_later_steps_are_as_before(engine: str, stage: int) -> None:
    evaluation = EvaluationTape(stream(training=False))
    without, found = phases(engine, stage, None), phases(engine, stage, evaluation)
    gathered = 4 * 4 * MIB if stage == 3 else 0  # both weights of 4 MiB, and the buffer that they are gathered into
    freed = 2 * MIB if engine == "fsdp" else 0  # the step's gradients, a quarter of the weights, go before it
    assert -freed <= found["evaluation"] - found["live"] - PASSED <= gathered
    assert {name: found[name] for name in ("init", "step", "live")} == {
        name: without[name] for name in ("init", "step", "live")
    }
    assert found["forward"] <= without["forward"] + gathered  # the next forward may find weights that were left gathered
    assert found["peak"] == max(found[name] for name in ("load", "init", "forward", "backward", "step", "evaluation"))


@pytest.mark.parametrize("batches", [1, 2, 3, 5])
def test_kept_logits_are_cast_gathered_and_joined(batches: int) -> None:
    """Where batches are joined, the sum so far, the next one and the longer sum are there at once."""
    kept = EvaluationTape(stream(training=False), LOGITS, 2 * LOGITS, 4 * LOGITS, batches)
    found = phases("ddp", 0, kept)
    whole = 4 * LOGITS
    joining = 2 * batches * whole if batches > 1 else whole + 2 * LOGITS  # one batch: gathered beside its own rank's
    # The forward of the last batch runs beside the sum and the last ones gathered.
    forward = PASSED + ((batches - 1) + (batches > 2)) * whole
    assert found["evaluation"] - found["live"] == max(joining, forward)


def test_one_rank_gathers_nothing_and_a_cast_stands_beside_what_it_casts() -> None:
    found = phases("ddp", 0, EvaluationTape(stream(training=False), LOGITS, 2 * LOGITS, 0, 1), gpus=1)
    assert found["evaluation"] - found["live"] == max(3 * LOGITS, PASSED)


def test_an_evaluation_that_no_figure_holds_leaves_the_answer_open() -> None:
    """The included runtime's is not modelled: one larger than the training's is named, a smaller one keeps less than it."""
    for batch, named in ((8, True), (1, False)):
        request = Ask(model="openai-community/gpt2", engine="zeroplan", stage=2, vram="80G", seq_len=256, eval_batch=batch)
        plan = estimate_report(request).plans[0]
        assert ("evaluation" in [one.key for one in plan.unmodelled]) is named
        assert plan.fits is (None if named else True)


def test_a_shipped_forward_decides_the_peak_of_a_small_micro_batch() -> None:
    request = Ask(model="meta-llama/Llama-3.2-1B", engine="ddp", vram="48G", gpus=2, seq_len=1024)
    small, large = (estimate_report(request.replace(eval_batch=batch)).plans[0].gpu for batch in (1, 16))
    assert small.peak_phase != "evaluation" == large.peak_phase
    # Logits in 16 bits, in fp32 and their logarithms: ten bytes a word and token.
    logits = 10 * 16 * 1024 * 128_256
    assert 0 <= large.phases["evaluation"] - large.live_after_step - logits < 0.25 * logits


def test_logits_without_an_evaluation_are_refused() -> None:
    with pytest.raises(BadInput, match="--eval-batch"):
        estimate_report(Ask(model="openai-community/gpt2", eval_logits=2))
