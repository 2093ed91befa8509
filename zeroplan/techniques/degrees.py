"""The techniques that a layout carries: ways in which ranks share more than samples."""

from __future__ import annotations

from zeroplan.techniques.base import Degree
from zeroplan.techniques.context_parallel import ContextParallelTechnique
from zeroplan.techniques.experts import ExpertParallelTechnique
from zeroplan.techniques.pipeline import PipelineTechnique
from zeroplan.techniques.tensor_parallel import TensorParallelTechnique
from zeroplan.techniques.ulysses import UlyssesTechnique

#: A row each, in the order in which their rules are held against a layout.
DIVIDING: list[Degree] = [
    TensorParallelTechnique(),
    ContextParallelTechnique(),
    UlyssesTechnique(),
    ExpertParallelTechnique(),
    PipelineTechnique(),
]
