"""Batches keep their types where floating inputs are cast, and every tensor in them is found."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import zeroplan_runtime
from zeroplan_runtime.pytree import cast_tensors, tensors_of

Pair = namedtuple("Pair", "x ids")


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "a"
    late: torch.Tensor = field(init=False, default=None)


class Encoding(UserDict):
    """As tokenizers return: a mapping that is no dict."""


def batches() -> list[Any]:
    x, ids = torch.ones(2, 3), torch.arange(2)
    return [
        Pair(x, ids),
        [x, (ids, {"deep": Pair(x, None)})],
        Frozen(x),
        OrderedDict(x=x, ids=ids),
        Encoding({"x": x, "ids": ids}),
    ]


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: type(batch).__name__)
def test_types_are_kept_and_only_floats_are_cast(batch: Any) -> None:
    before = list(tensors_of(batch))
    made = cast_tensors(batch, torch.float16)
    after = list(tensors_of(made))
    assert type(made) is type(batch)
    assert [t.dtype for t in after] == [torch.float16 if t.is_floating_point() else t.dtype for t in before]
    assert all(t.dtype != torch.float16 for t in tensors_of(batch))  # the user's is as it was
    assert len(after) >= 1


def test_outputs_of_transformers_stay_what_they_are() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    made = cast_tensors(outputs.BaseModelOutput(last_hidden_state=torch.ones(2)), torch.bfloat16)
    assert isinstance(made, outputs.BaseModelOutput)
    assert made.last_hidden_state.dtype == made["last_hidden_state"].dtype == torch.bfloat16


class ByName(nn.Module):
    """Reads a named tuple's fields, which a plain tuple lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch: Pair) -> torch.Tensor:
        return self.layer(batch.x).float().mean()


def test_an_engine_that_casts_hands_over_named_tuples() -> None:
    config = {"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 1}, "optimizer": {"type": "SGD"}}
    engine, *_ = zeroplan_runtime.initialize(model=ByName(), config=config, device="cpu")
    engine.backward(engine(Pair(torch.ones(2, 3), torch.arange(2))))
    engine.step()
    engine.destroy()
