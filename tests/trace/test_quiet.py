"""A trace says nothing: what a model's code logs in its forward is no part of an answer."""

from __future__ import annotations

import logging

import torch

from zeroplan.core.tape_options import TraceOptions
from zeroplan.trace.run import record


class Talking(torch.nn.Module):
    """A model whose forward warns, as transformers' GPT-2 does of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("transformers.modeling_utils").warning("noise")
        return (self.weight * x).sum()


def test_transformers_does_not_warn_in_a_trace() -> None:
    said: list[str] = []
    logger = logging.getLogger("transformers")
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    try:
        record(Talking(), lambda: {"x": torch.ones(8, device="meta")}, TraceOptions())
        assert said == []
        assert logger.level == level
    finally:
        logger.removeHandler(handler)
