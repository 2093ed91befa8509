"""Gradients that are reduced in each micro batch's backward, and add up as this rank's parts.

Of the micro batches before the last, FSDP2 and FSDP 1 else leave whole gradients (``set_requires_gradient_sync``,
``no_sync``), as accelerate, the HF Trainer, Lightning and LitGPT have it, unless ``sync_each_batch`` is set. Loops that call
neither, as torchtune's and torchtitan's, reduce each; so does Composer's under FSDP (``composer/trainer/trainer.py`` of 0.33).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroplan.core.option import RUNS, SEARCHES, WORK, Option
from zeroplan.techniques.base import OptionValues, TakesTechniques, Technique


@dataclass(frozen=True, slots=True)
class SyncedPasses:
    """Each backward reduces its gradients."""


class SyncedPassesTechnique(Technique[SyncedPasses]):
    """Gradients reduced by each backward."""

    name = "reduction in each pass"
    kind = SyncedPasses
    where = "--sync-each"
    sync_each = Option(
        bool,
        False,
        "Each micro batch reduces its gradients; else the step's last one does (--engine fsdp, fsdp2).",
        WORK,
        without=(*SEARCHES, *RUNS),
    )
    engines = ("fsdp", "fsdp2")
    refusal = "whether {engine} reduces each pass is not an option of its programs"
    remedy = "leave it out, or use --engine fsdp2"

    def value(self, asked: OptionValues, engine: TakesTechniques) -> SyncedPasses | None:
        """Return it where ``--sync-each`` asks for it."""
        return SyncedPasses() if asked[SyncedPassesTechnique.sync_each] else None

    def described(self, value: SyncedPasses) -> Mapping[str, Any]:
        """Return what a report's JSON shows."""
        return {"sync_each": True}
