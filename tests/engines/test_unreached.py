"""Parameters that no micro batch gives a gradient, such as a vision tower that reads no image: who makes what for them."""

from __future__ import annotations

import pytest

import zeroplan
from tests.engines.deepspeed.llama_tape import CONFIG, llama_tape
from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.tape.expanded import ExpandedTape, Op

#: A matrix of the second block, and the whole block.
MATRIX, BLOCK = "model.layers.1.mlp.up_proj.weight", "model.layers.1."
ELEMENTS = 2048 * 8192


def without_gradients(tape: ExpandedTape, prefix: str) -> ExpandedTape:
    """The tape in which parameters of such names get no gradient."""
    gone = {p for p, param in enumerate(tape.params) if param.name.startswith(prefix)}
    storages = {aux for op, arg, aux, *_ in tape.events() if op == Op.GRAD and arg in gone}
    kept = [
        event
        for event in tape.events()
        if not (event[0] == Op.GRAD and event[1] in gone) and not (event[0] in (Op.ALLOC, Op.FREE) and event[1] in storages)
    ]
    return tape.with_events(kept)


def allocated(engine: str, tape: ExpandedTape, at: str, *, stage: int, gpus: int = 1) -> int:
    """Bytes at a mark of the last step."""
    case = Case(load_model(dict(CONFIG)), Workload.of(seq_len=16), Cluster.of(gpus=gpus), ZeroConfig.of(stage))
    marks = find_engine(engine).simulate(case, tape).timeline.marks
    return [mark for mark in marks if mark.name.startswith(at)][-1].allocated


@pytest.fixture(scope="module")
def whole() -> ExpandedTape:
    return llama_tape(2)


@pytest.mark.parametrize(
    ("engine", "stage", "gpus", "prefix", "at", "bytes_an_element"),
    [
        ("ddp", 0, 1, MATRIX, "step", -8),  # torch's optimizers make no states
        ("fsdp2", 3, 1, MATRIX, "step", -8),
        ("fsdp2", 3, 2, MATRIX, "step", -4),
        ("fsdp", 3, 1, MATRIX, "step", 0),  # its flat parameter has a gradient, of zeros where the matrix lies
        ("deepspeed", 0, 1, MATRIX, "step", 0),
        ("deepspeed", 0, 1, MATRIX, "bwd", 0),  # zeros where the gradient was
        ("deepspeed", 1, 1, MATRIX, "step", 0),
        ("deepspeed", 1, 1, MATRIX, "bwd", 2),  # zeros beside the partition's buffer, which has room for them
        ("deepspeed", 2, 1, MATRIX, "bwd", 2),
        ("deepspeed", 3, 1, MATRIX, "bwd", 0),  # its partition is there from the beginning
    ],
)
def test_what_is_held_for_a_parameter_without_gradient(
    whole: ExpandedTape, engine: str, stage: int, gpus: int, prefix: str, at: str, bytes_an_element: int
) -> None:
    less = without_gradients(whole, prefix)
    change = allocated(engine, less, at, stage=stage, gpus=gpus) - allocated(engine, whole, at, stage=stage, gpus=gpus)
    assert abs(change - bytes_an_element * ELEMENTS) <= 2048  # the optimizer's counters


def test_fsdp_steps_no_unit_without_any_gradient(whole: ExpandedTape) -> None:
    less = without_gradients(whole, BLOCK)
    elements = sum(less.parameters.numel[p] for p in less.parameters.unreached)
    change = allocated("fsdp", less, "step", stage=3) - allocated("fsdp", whole, "step", stage=3)
    assert abs(change + (4 + 8) * elements) <= 16384  # its gradient, which else stays until the next forward, and two states


def test_a_plan_has_no_line_for_states_that_are_not_made() -> None:
    """Gemma 3 of text alone: nothing flows through its vision tower."""
    plan = zeroplan.estimate("google/gemma-3-4b-pt", engine="ddp", seq_len=128, gradient_checkpointing=True, attn="eager")[0]
    held = {line.buffer: line.bytes for line in plan.lines}
    assert held["param.full"] - held["optim.exp_avg"] == 4 * 419_816_304
