"""A trace says nothing: what a model's code logs in its forward is no part of an answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers

from zeroplan.tape.options import TraceOptions
from zeroplan.trace.build import build_model, full_config
from zeroplan.trace.run import record


class Talking(torch.nn.Module):
    """A model whose forward warns, as transformers' GPT-2 does of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("transformers.modeling_utils").warning("noise")
        return (self.weight * x).sum()


@contextmanager
def listening() -> Iterator[list[str]]:
    """Yield what transformers says in the block; its level must be as before afterwards."""
    said: list[str] = []
    logger = logging.getLogger(transformers.__name__)
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    try:
        yield said
        assert logger.level == level
    finally:
        logger.removeHandler(handler)


def test_transformers_does_not_warn_in_a_trace() -> None:
    with listening() as said:
        record(Talking(), lambda: {"x": torch.ones(8, device="meta")}, TraceOptions())
    assert said == []


def test_transformers_does_not_warn_of_a_model_that_is_built() -> None:
    """GPT-2's default tokens lie outside a small vocabulary, and its class has no loss of its own name."""
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    with listening() as said:
        model = build_model(full_config(config), "AutoModelForCausalLM", TraceOptions(), 0)
        record(model, lambda: {"input_ids": ids, "labels": ids}, TraceOptions())
    assert said == []
