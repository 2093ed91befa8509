"""DeepSpeed's fused transformer layer with its memory flags, also in BERT of transformers: docs/legacy.md."""

from zeroplan_runtime.techniques.transformer.config import DeepSpeedTransformerConfig
from zeroplan_runtime.techniques.transformer.layer import DeepSpeedTransformerLayer
from zeroplan_runtime.techniques.transformer.models import use_transformer_layer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer", "use_transformer_layer"]
