"""Drawn configurations whose first prediction was wrong, and whose cause is modelled since: held to what the GPU counted."""

import pytest

from benchmarks.accuracy import measure_row
from benchmarks.rows import DRAWN, load_rows
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.tape.options import Checkpointing

#: What was missing, and by how much allocated memory was off.
MODELLED = {
    "W75": "sdpa of unequal heads takes torch's own products (-42 %)",
    "W35": "Adagrad's first states stay with DeepSpeed's engine (-8.3 %)",
    "W62": "the same, of adapters (-2.4 %)",
    "W66": "rows of frozen experts are not kept (+1.2 %, reserved +14 %)",
    "W07": "Muon's two groups are flattened and stepped one after the other (+7.0 %, reserved +15 %)",
    "U02": "fp16 gradients that are reduced in bf16 are cast (-13.5 %)",
    "W27": "torch's SGD adds its weight decay in a list of its own (reserved -12 %)",
    "W69": "stage 3 gathers a weight that another module reads where it is read, and fetches peft's wrapper",
    "W25": "a reentrant checkpoint's backward has the gradients of its own (-0.4 %)",
    "U03": "the same, under FSDP2 (-0.13 %)",
    "W38": "what the allocator was told was left out of the request (reserved +17 %)",
}

#: Those that are traced anew.
TRACED = ("W75", "W62", "W25", "U03")


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.long) if row in TRACED else row for row in MODELLED])
def test_what_was_missed_is_met(row: str) -> None:
    (measured,) = (one for one in load_rows(DRAWN) if one["id"] == row)
    found = measure_row(measured)
    assert abs(found.peak_allocated) < 1e-4
    assert abs(found.peak_reserved) < 2e-4


@pytest.mark.parametrize(("row", "error"), [("U11", 5e-4), pytest.param("U04", 0.01, marks=pytest.mark.long)])
def test_no_step_is_discarded_where_the_loss_scale_is_given(row: str, error: float) -> None:
    """Reserved memory was 1.8 and 4.2 % too high."""
    (measured,) = (one for one in load_rows(DRAWN) if one["id"] == row)
    assert abs(measure_row(measured).peak_reserved) < error


@pytest.mark.long
def test_weights_of_experts_that_adapters_read_are_reserved() -> None:
    """Gathered one by one in the first forward; the adapters stay until the backward (-2 %, and SGD's list, -9 %)."""
    (measured,) = (one for one in load_rows(DRAWN) if one["id"] == "W05")
    assert abs(measure_row(measured).peak_reserved) < 5e-4


@pytest.mark.parametrize(
    ("engine", "stage", "reentrant", "way"),
    [
        ("deepspeed", 1, True, Checkpointing.REENTRANT),
        ("deepspeed", 1, False, Checkpointing.NON_REENTRANT),
        ("deepspeed", 3, True, Checkpointing.NON_REENTRANT),
        ("fsdp2", 3, True, Checkpointing.REENTRANT),
    ],
)
def test_reentrant_checkpoints_are_traced_as_such(engine: str, stage: int, reentrant: bool, way: Checkpointing) -> None:
    asked = Ask(model="google/flan-t5-base", engine=engine, stage=stage, gradient_checkpointing=True, reentrant=reentrant)
    resolved = resolve(asked)
    assert resolved.engine.trace_options(resolved.cases[0]).checkpointing is way


@pytest.mark.torch
@pytest.mark.long
def test_reentrant_checkpoints_of_t5_hand_position_biases_on() -> None:
    """The cross attention's bias and its gradient do not stay (+0.8 %). What fp16 clamps between is not traced: 2.5 MiB."""
    (measured,) = (one for one in load_rows(DRAWN) if one["id"] == "W76")
    found = measure_row(measured)
    assert abs(found.peak_allocated) < 0.0015
    assert abs(found.peak_reserved) < 0.002


@pytest.mark.parametrize(
    ("row", "error"),
    [
        pytest.param("W34", 0.02, id="masters on the GPU are cast on the host on their way to offloaded parameters (-27 %)"),
        pytest.param(
            "W76",
            0.03,
            marks=pytest.mark.long,
            id="on the host, too, torch's SGD adds its weight decay in a tensor of its own (-16 %)",
        ),
        pytest.param("U09", 0.01, id="FSDP 1's model has the tied matrix twice until it is tied (-11 %)"),
        pytest.param("W56", 0.01, id="fp16 looks through all offloaded gradients at once (-10 %)"),
    ],
)
def test_host_memory_that_was_missed_is_met(row: str, error: float) -> None:
    (measured,) = (one for one in load_rows(DRAWN) if one["id"] == row)
    found = measure_row(measured)
    assert found.host_rss is not None
    assert abs(found.host_rss) < error
