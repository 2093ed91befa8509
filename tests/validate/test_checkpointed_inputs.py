"""Checkpointed inputs that ``cpu_checkpointing`` moves: planned from the tape, and measured on a rank, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.test_tensor_parallel import CONFIG as SPLIT
from tests.validate.small import CONFIG, compared_here
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.run.ask import Ask
from zeroplan.validate.planned import predict

pytestmark = pytest.mark.torch

BATCH, LENGTH, WIDTH, BLOCKS = 2, 24, CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
MOVES = {"activation_checkpointing": {"cpu_checkpointing": True}, "bf16": {"enabled": True}}
#: An encoder's three blocks share a bias of positions, and a decoder's three that and the encoder's output.
T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": WIDTH,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 499,
    "decoder_start_token_id": 0,
}


@pytest.mark.parametrize(
    ("model", "options", "leaving"),
    [
        (CONFIG, {}, BLOCKS - 1),
        pytest.param(CONFIG, {"lora_rank": 4}, BLOCKS - 2, marks=pytest.mark.long),  # the first block's input is a leaf
        pytest.param(T5, {}, 5, marks=pytest.mark.long),
    ],
    ids=["llama", "lora", "t5"],
)
def test_plan_and_measurement_are_equal(model: dict[str, Any], options: dict[str, Any], leaving: int) -> None:
    config = {**MOVES, "zero_optimization": {"stage": 2}}
    found = compared_here(config, model=model, micro_batch=BATCH, seq_len=LENGTH, gradient_checkpointing=True, **options)
    assert not found.mismatches
    row = next(row for row in found.rows if row.name == "activation.checkpoint")
    assert (row.judged, row.planned, row.measured) == ("exact", *2 * (leaving * BATCH * LENGTH * WIDTH * 2,))
    line = next(line for line in found.plan.lines if line.buffer == "activation.checkpoint")
    assert (line.place, line.bytes, line.phases) == ("pinned", row.planned, ("forward", "backward", "step"))
    assert "inputs_offloaded × micro_batch × seq_len × hidden × param_bytes" in line.formula
    pinned = next(row for row in found.totals if row.name == "pinned memory")
    assert pinned.planned == pinned.measured == row.planned
    assert found.plan.cpu.phases["step"] - found.plan.cpu.phases["init"] > 0


def test_on_the_device_two_are_there_at_a_time() -> None:
    """Beside the logits, where both halves peak, the difference is what has left; nothing else differs."""
    batch, length = 8, 256

    def phases(moves: bool) -> dict[str, int]:
        config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, **(MOVES if moves else {})}
        request = Ask(
            model={**CONFIG, "num_hidden_layers": 8},
            engine="zeroplan",
            ds_config=config,
            micro_batch=batch,
            seq_len=length,
            gradient_checkpointing=True,
        )
        resolved = resolve(request)
        return predict(resolved.engine, resolved.cases[0], ExpandedTapes(resolved.engine)).plan.gpu.phases

    one = batch * length * WIDTH * 2  # a multiple of the allocator's 512 bytes
    kept, moved = phases(moves=False), phases(moves=True)
    # Before the forward ends the last but one is still leaving; when the backward begins, only the newest is there.
    assert kept["forward"] - moved["forward"] == 6 * one
    assert kept["backward"] - moved["backward"] == 7 * one
    assert {name: kept[name] - moved[name] for name in ("init", "step")} == {"init": 0, "step": 0}


def test_ranks_that_hold_inputs_alike_keep_parts_of_them() -> None:
    """Beside the logits half of every input but the newest is gone, and on the host there are the other halves."""
    batch, length, blocks = 8, 256, 8
    model = {**SPLIT, "num_hidden_layers": blocks, "tie_word_embeddings": False}

    def plan(**section: bool) -> MemoryPlan:
        config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "activation_checkpointing": section}
        resolved = resolve(
            Ask(
                model=model,
                engine="zeroplan",
                ds_config=config,
                gpus=2,
                tp=2,
                micro_batch=batch,
                seq_len=length,
                gradient_checkpointing=True,
            )
        )
        planned = predict(resolved.engine, resolved.cases[0], ExpandedTapes(resolved.engine))
        assert not planned.not_simulated
        return planned.plan

    one = batch * length * int(SPLIT["hidden_size"]) * 2
    whole, parts = plan(), plan(partition_activations=True)
    away = plan(partition_activations=True, cpu_checkpointing=True)
    for phase in ("forward", "backward"):
        assert whole.gpu.phases[phase] - parts.gpu.phases[phase] == (blocks - 1) * one // 2
    assert whole.gpu.phases["backward"] - away.gpu.phases["backward"] == (blocks - 1) * one
    assert away.cpu.pinned == 2 * (blocks - 1) * one // 2  # of both ranks
    line = next(line for line in away.lines if line.buffer == "activation.checkpoint" and line.place == "pinned")
    assert line.bytes == (blocks - 1) * one // 2
    assert whole.fits is parts.fits is None


def test_split_tokens_are_divided_already() -> None:
    config = {"zero_optimization": {"stage": 2}, "activation_checkpointing": {"partition_activations": True}}
    request = Ask(model=dict(SPLIT), engine="zeroplan", ds_config=config, gpus=2, tp=2, sp=True, seq_len=64)
    with pytest.raises(BadInput, match="sequence parallelism has divided"):
        estimate_report(request)
