"""Every technique, a row each, in the order in which their rules are held against a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zeroplan.core.workload import Workload
from zeroplan.techniques.base import Technique
from zeroplan.techniques.compiled import COMPILED
from zeroplan.techniques.cut_cross_entropy import CutCrossEntropyTechnique
from zeroplan.techniques.dora import DoraTechnique
from zeroplan.techniques.evaluation import EvaluationTechnique, LengthsTechnique
from zeroplan.techniques.float8 import FLOAT8
from zeroplan.techniques.generation import GENERATION, ColocatedTechnique
from zeroplan.techniques.kept_gradients import KeptGradientsTechnique
from zeroplan.techniques.liger import LigerTechnique
from zeroplan.techniques.offloaded_checkpoints import OffloadedCheckpointsTechnique
from zeroplan.techniques.optimizers import RUNTIME_OPTIMIZERS
from zeroplan.techniques.pair_loss import PairLossTechnique
from zeroplan.techniques.quantized_base import QUANTIZED_BASE
from zeroplan.techniques.reduced_gradients import REDUCED_GRADIENTS
from zeroplan.techniques.saving import SavingTechnique
from zeroplan.techniques.synced_passes import SyncedPassesTechnique
from zeroplan.techniques.tiles import TiledLossTechnique, TiledMlpTechnique

#: The techniques.
TABLE: list[Technique[Any]] = [
    KeptGradientsTechnique(),
    FLOAT8,
    PairLossTechnique(),
    COMPILED,
    TiledMlpTechnique(),
    TiledLossTechnique(),
    OffloadedCheckpointsTechnique(),
    QUANTIZED_BASE,
    LengthsTechnique(),
    EvaluationTechnique(),
    GENERATION,
    ColocatedTechnique(),
    SavingTechnique(),
    REDUCED_GRADIENTS,
    RUNTIME_OPTIMIZERS,
    DoraTechnique(),
    LigerTechnique(),
    CutCrossEntropyTechnique(),
    SyncedPassesTechnique(),
]


def techniques_of(workload: Workload) -> Iterator[tuple[Technique[Any], Any]]:
    """Yield the techniques that are on in a workload, with their values."""
    for technique in TABLE:
        value = technique.of(workload)
        if value is not None:
            yield technique, value


def keys_of(program: str) -> dict[str, str]:
    """Return the keys of a program that ask for techniques, and the option that each sets."""
    return {key: option for technique in TABLE for key, option in technique.keys.get(program, {}).items()}
