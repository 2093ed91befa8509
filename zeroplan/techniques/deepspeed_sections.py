"""What sections of a ds_config ask for, and the included runtime does: block-sparse attention, a curriculum of
sequence lengths, dropped layers, weights that are rounded while they are trained, and steps that ranks take alone.

The parser of the sections makes their values (:mod:`zeroplan.ds_config`), which refuses what does not go together, and the
runtime's files are those of ``zeroplan_runtime/techniques``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.curriculum import CURRICULUM_LEARNING, Curriculum
from zeroplan.core.layer_drop import LAYER_DROP, ProgressiveLayerDrop
from zeroplan.core.quantize_training import QUANTIZE_TRAINING, QuantizeTraining
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.techniques.base import Technique


class SectionTechnique(Technique[Any]):
    """A technique of a section, named `where`, which the engine that reads the section holds against the run itself."""

    def described(self, value: Any) -> Mapping[str, Any]:
        """Return the section."""
        return {self.shown: value.as_section() if hasattr(value, "as_section") else value}

    def instructions(self, value: Any) -> tuple[str, ...]:
        """Return the section, which an engine that writes one has."""
        return (f"keep {self.where} in its ds_config",)


class SparseAttentionTechnique(SectionTechnique):
    """Attention that leaves out blocks of scores."""

    name = shown = where = "sparse_attention"
    kind = SparseAttention
    looped = True
    unsearched = "the time that block-sparse attention takes is in no figure"


class CurriculumTechnique(SectionTechnique):
    """Sequences that grow."""

    name = shown = "curriculum"
    kind = Curriculum
    where = CURRICULUM_LEARNING
    unsearched = "what is reserved as the sequences of a curriculum grow is in no figure, nor is the time of the shorter steps"

    def unlooped(self, value: Any) -> str:
        """Return why a few steps are none."""
        return "a few steps of a curriculum are its shortest, and plans are of its longest"


class LayerDropTechnique(SectionTechnique):
    """Layers that are dropped by chance."""

    name, shown = "layer drop", "layer_drop"
    kind = ProgressiveLayerDrop
    where = LAYER_DROP
    unsearched = "the time of steps with fewer layers is in no figure, nor is what is reserved as layers differ"

    def unlooped(self, value: Any) -> str:
        """Return why a few steps are none."""
        return "steps may leave layers out, and plans are of all layers"


class QuantizeTrainingTechnique(SectionTechnique):
    """Weights that are rounded."""

    name = shown = "quantize_training"
    kind = QuantizeTraining
    where = QUANTIZE_TRAINING
    looped = True
    unsearched = "the time that rounding the weights takes is in no figure"


class LocalStepsTechnique(SectionTechnique):
    """Steps that ranks take alone, between 0/1 Adam's synchronisations."""

    name = shown = "local_steps"
    kind = int
    where = "local_step_clipper"
    leaf = "local_steps"
    looped = True
    unsearched = "the time of local steps is in no figure"
