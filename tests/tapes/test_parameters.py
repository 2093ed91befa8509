"""The ledger lists a model's parameters from its ModelSpec, a schedule from its tape: both lists are the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workloads import flat_workload
from zeroplan.core.parameters import Parameters
from zeroplan.core.workload import Workload
from zeroplan.models.catalog import entries
from zeroplan.models.load import bare_params, load_model
from zeroplan.models.lora import with_lora
from zeroplan.tapes import find_tape

#: One model of each family in the catalog.
MODELS = sorted({entry.config["model_type"]: entry.id for entry in entries()}.values())


def _columns(parameters: Parameters) -> dict[str, Any]:
    def plain(name: str) -> str:
        return name.removeprefix("base_model.model.")  # peft's wrapper, which a spec's names lack

    return {
        "names": [plain(name) for name in parameters.names],
        "shapes": parameters.shapes,
        "trainable": parameters.trainable,
        "adapters": parameters.adapters,
        "blocks": [plain(name) for name in parameters.blocks],
        "modules": [module for module in parameters.modules if module],
    }


@pytest.mark.parametrize("lora_rank", [None, 8])
@pytest.mark.parametrize("name", MODELS)
def test_spec_and_tape_list_the_same_parameters(name: str, lora_rank: int | None) -> None:
    spec = load_model(name)
    if lora_rank is not None:
        spec = with_lora(spec, lora_rank, ())
    tape = find_tape(spec, flat_workload(seq_len=128, lora_rank=lora_rank))
    if tape is None:
        pytest.skip("no tape of this model is shipped")
    told, traced = _columns(spec.parameters), _columns(tape.expand(1, 128, lora_rank).parameters)
    assert [column for column in told if told[column] != traced[column]] == []
    assert spec.parameters.total == spec.params
    assert spec.parameters.trained_total == spec.trainable


def test_linear_layers_travel_in_16_bits_under_autocast() -> None:
    """GPT-2's projections are Conv1D of transformers, which DeepSpeed's list lacks; its tied head is a linear layer."""
    spec = load_model("openai-community/gpt2")
    tape = find_tape(spec, Workload.of(seq_len=128))
    assert tape is not None
    for parameters in (spec.parameters, tape.expand(1, 128).parameters):
        linear = [name for name, on in zip(parameters.names, parameters.autocast, strict=True) if on]
        assert linear == ["transformer.wte.weight"]


def test_a_bare_count_is_a_stand_in() -> None:
    assert bare_params(10**9).parameters.largest_trained == 0
    assert bare_params(10**9, largest_layer=10**6).parameters.largest_trained == 10**6
