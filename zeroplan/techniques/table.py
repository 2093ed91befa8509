"""Every technique, a row each, in the order in which their rules are held against a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zeroplan.core.workload import Workload
from zeroplan.techniques.base import KeptBlocks, Technique
from zeroplan.techniques.checkpointing import CheckpointingTechnique
from zeroplan.techniques.chunked_head import ChunkedHeadTechnique
from zeroplan.techniques.compiled import COMPILED
from zeroplan.techniques.cut_cross_entropy import CutCrossEntropyTechnique
from zeroplan.techniques.deepspeed_sections import (
    CurriculumTechnique,
    LayerDropTechnique,
    LocalStepsTechnique,
    QuantizeTrainingTechnique,
    SparseAttentionTechnique,
)
from zeroplan.techniques.dora import DoraTechnique
from zeroplan.techniques.ema import EmaTechnique
from zeroplan.techniques.evaluation import EvaluationTechnique
from zeroplan.techniques.float8 import FLOAT8, Bf16LayersTechnique
from zeroplan.techniques.freeze import FreezeTechnique
from zeroplan.techniques.fused_adapters import FusedAdaptersTechnique
from zeroplan.techniques.generation import ColocatedTechnique, GenerationTechnique
from zeroplan.techniques.kept_gradients import KeptGradientsTechnique
from zeroplan.techniques.label_smoothing import LabelSmoothingTechnique
from zeroplan.techniques.lengths import LengthsTechnique
from zeroplan.techniques.liger import LigerTechnique
from zeroplan.techniques.lora import LoraTechnique
from zeroplan.techniques.media import MediaTechnique
from zeroplan.techniques.modules_to_save import ModulesToSaveTechnique
from zeroplan.techniques.neftune import NeftuneTechnique
from zeroplan.techniques.offloaded_checkpoints import OffloadedCheckpointsTechnique
from zeroplan.techniques.older_transformers import OlderTransformersTechnique
from zeroplan.techniques.optimizers import RUNTIME_OPTIMIZERS, ConfiguredOptimizersTechnique
from zeroplan.techniques.pair_loss import PairLossTechnique, ReferenceTechnique
from zeroplan.techniques.ppo import PpoTechnique
from zeroplan.techniques.quantized_base import QUANTIZED_BASE
from zeroplan.techniques.reduced_gradients import REDUCED_GRADIENTS
from zeroplan.techniques.saving import SavingTechnique
from zeroplan.techniques.synced_passes import SyncedPassesTechnique
from zeroplan.techniques.tiles import TiledLossTechnique, TiledMlpTechnique

if TYPE_CHECKING:
    from zeroplan.models.spec import ModelSpec

#: The techniques.
TABLE: list[Technique[Any]] = [
    OlderTransformersTechnique(),
    REDUCED_GRADIENTS,
    KeptGradientsTechnique(),
    CheckpointingTechnique(),
    QUANTIZED_BASE,
    LoraTechnique(),
    FreezeTechnique(),
    FLOAT8,
    Bf16LayersTechnique(),
    PairLossTechnique(),
    ReferenceTechnique(),
    PpoTechnique(),
    COMPILED,
    MediaTechnique(),
    ChunkedHeadTechnique(),
    LengthsTechnique(),
    TiledMlpTechnique(),
    TiledLossTechnique(),
    OffloadedCheckpointsTechnique(),
    EvaluationTechnique(),
    GenerationTechnique(),
    ColocatedTechnique(),
    SavingTechnique(),
    RUNTIME_OPTIMIZERS,
    ConfiguredOptimizersTechnique(),
    DoraTechnique(),
    ModulesToSaveTechnique(),
    FusedAdaptersTechnique(),
    LigerTechnique(),
    CutCrossEntropyTechnique(),
    LabelSmoothingTechnique(),
    NeftuneTechnique(),
    EmaTechnique(),
    SyncedPassesTechnique(),
    SparseAttentionTechnique(),
    CurriculumTechnique(),
    LayerDropTechnique(),
    QuantizeTrainingTechnique(),
    LocalStepsTechnique(),
]


def found_in(workload: Workload, spec: ModelSpec) -> Workload:
    """Return the workload without techniques that find nothing of theirs in the model."""
    nothing = [type(value) for technique, value in techniques_of(workload) if technique.named(value, spec) is None]
    return workload.without(*nothing) if nothing else workload


def techniques_of(workload: Workload) -> Iterator[tuple[Technique[Any], Any]]:
    """Yield the techniques that are on in a workload, with their values."""
    for technique in TABLE:
        value = technique.of(workload)
        if value is not None:
            yield technique, value


def blocks_of(workload: Workload, rank: Any) -> tuple[KeptBlocks, ...]:
    """Return the blocks of the GPU that techniques keep on a rank, whose facts their ledger lines read."""
    found = (technique.blocks(value, rank) for technique, value in techniques_of(workload))
    return tuple(one for one in found if one is not None)


def keys_of(program: str) -> dict[str, str]:
    """Return the keys of a program that ask for techniques, and the option that each sets."""
    return {key: option for technique in TABLE for key, option in technique.keys.get(program, {}).items()}
