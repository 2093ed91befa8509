"""The interface of an engine's work: what it sends, copies and updates beside the model's own computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.ledger.traffic import WorkLedger


class Hooks(StrEnum):
    """What Python runs an engine's hooks for, beside issuing kernels."""

    NONE = "none"
    PARAMETERS = "parameters"  # each that is gathered, in the forward and in the backward
    GRADIENTS = "gradients"  # each that is complete
    MODULES = "modules"  # each that is entered or passed


@dataclass(frozen=True, slots=True)
class Sharing:
    """How an engine's ranks share their work under a layout, as far as time depends on it. FSDP2's way is the default.

    Attributes:
        gathers_once: parameters are gathered once a step and not for each micro batch.
        overlaps: these gathers run beside the first forward, and the reduction beside the last backward.
        pipelines_tensor: collectives of tensor parallelism run in parts beside the products that they belong to, where ranks
            share the tokens between them, too.
        even_stages: blocks alone are divided over pipeline stages, evenly; embedding and head count for nothing.
        reduced_bytes: of a gradient element on its way.
        cast_bytes: moved in memory for each element of a shard that is gathered; FSDP2 casts it from fp32.
        copied_bytes: moved for each gathered element, which is put in its place.
        packed_bytes: moved for each element that is reduced, which is copied in, cast and averaged.
        reduces_each: gradients are reduced after each micro batch, though parameters are gathered once.
        own_step: what a step does beside the update, on the GPU and in Python, is in the engine's lines of traffic.
        dispatches: matrices and norms that ranks share are torch's DTensors, whose operations Python dispatches.
        hooks: what runs hooks.
        sums_jointly: layers of one input sum its gradient over tensor-parallel ranks together, and not each by itself.
        hides_exchange: exchanges of experts run beside another micro batch's computation, as far as that lasts.
        gathers_logits: tensor-parallel ranks gather each other's logits.
        gathers_again: tokens that ranks share are gathered once more in the backward, and not kept.
    """

    gathers_once: bool = False
    overlaps: bool = True
    pipelines_tensor: bool = False
    even_stages: bool = False
    reduced_bytes: int = 4
    cast_bytes: int = 4 + 2
    copied_bytes: int = 2 * 2
    packed_bytes: int = 2 * 2 + 2 * 4
    reduces_each: bool = False
    own_step: bool = False
    dispatches: bool = True
    hooks: Hooks = Hooks.PARAMETERS
    sums_jointly: bool = False
    gathers_logits: bool = False
    gathers_again: bool = False
    hides_exchange: bool = False


class Traffic(ABC):
    """One engine's lines of work for one model on one cluster. Sums over the model's parameters are kept between calls.

    Attributes:
        ledger: the lines. Those of the forward and the backward are of one micro batch, those of the step of one optimizer
            step, all on one rank.
    """

    ledger: ClassVar[WorkLedger]

    @abstractmethod
    def facts(self, compute: ComputeFacts, workload: Workload, zero: ZeroConfig) -> Any:
        """Return what the lines read of one configuration; `compute` is what the model's own computation takes."""

    def overlaps(self, zero: ZeroConfig) -> bool:
        """Return whether collectives and copies run beside the computation."""
        return True
