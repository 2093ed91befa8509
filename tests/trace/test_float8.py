"""Linear layers that multiply in 8-bit floats."""

from __future__ import annotations

from typing import Any

import pytest

from tests.small_llama import small_llama
from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.unmodelled import may_add
from zeroplan.ledger.line import evaluate
from zeroplan.planner.estimate import estimate_report, estimate_runs
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask

LAYERS = 3
ASKED: dict[str, Any] = {
    "model": small_llama(layers=LAYERS),
    "engine": "fsdp2",
    "stage": 3,
    "gpus": 2,
    "gpu": "H200",
    "seq_len": 640,
}


@pytest.mark.torch
@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("ddp", marks=pytest.mark.long)])
def test_operands_are_cast_for_each_product(engine: str) -> None:
    """Each of the linear layers between the first and the last takes its weight in 8 bits twice; what is kept stays."""
    asked = {**ASKED, "engine": engine, "stage": 3 if engine == "fsdp2" else 0, "depth": "simulated"}
    runs = [estimate_runs(Ask(**asked, fp8=recipe)).runs[0] for recipe in (None, "tensorwise", "rowwise")]
    plain, whole, rows = runs
    assert plain is not None
    assert whole is not None
    assert rows is not None
    wide = 512 * 256
    casts = [run.tape.storage_bytes.count(wide) - plain.tape.storage_bytes.count(wide) for run in (whole, rows)]
    assert min(casts) >= LAYERS * 3 * 2  # gate, up and down in every block
    scales = 4 * 640 * 512  # the gradients of gate and up, scaled by rows and columns after the product
    assert rows.tape.storage_bytes.count(scales) > whole.tape.storage_bytes.count(scales)
    held = [run.simulation.timeline.marks[-1].allocated for run in runs if run is not None]
    assert held[1] == held[0]
    assert not may_add(whole.plan.unmodelled)


@pytest.mark.torch
def test_first_and_last_layers_and_those_of_other_sizes_stay() -> None:
    from torch import nn

    from zeroplan.trace.float8 import Float8Linear, convert

    layers = [nn.Linear(*shape) for shape in ((32, 32), (32, 40), (40, 32), (32, 32), (32, 32))]
    convert(nn.Sequential(*layers), Float8Recipe.TENSORWISE, autocasts=False)
    assert [type(layer) is Float8Linear for layer in layers] == [False, False, False, True, False]


def test_states_are_those_of_16_bits() -> None:
    with_, without = (
        {i.buffer: i.bytes for i in evaluate(*found.engine.ledger(found.cases[0]))}
        for found in (resolve(Ask(**ASKED, fp8=recipe)) for recipe in ("rowwise", None))
    )
    assert with_ == without
    assert with_[Buffer.PARAM_SHARD]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fp8": "rows"}, "no recipe is called 'rows'"),
        ({"fp8": "nvfp4"}, "4-bit products are not modelled.*; plan mxfp8"),
        ({"engine": "deepspeed"}, "not modelled under deepspeed"),
        ({"lora_rank": 8}, "adapters beside 8-bit products"),
        ({"dtype": "fp16"}, "stand in for bf16's"),
        ({"gpu": "A100-80G"}, "has no 8-bit floats"),
        ({"tp": 2}, "data parallelism alone; leave --tp out"),
    ],
)
def test_what_is_not_modelled_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        estimate_report(Ask(**{**ASKED, "fp8": "rowwise", **changes}))
