"""Evaluation between training steps: how many samples pass, and which results stay on the GPU.

Source: transformers 5.17, ``trainer.py`` (``evaluation_loop``, ``prediction_step``) and ``trainer_pt_utils.py``
(``EvalLoopContainer``, ``nested_concat``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation does.

    Attributes:
        batch: samples of each GPU in one pass; they are as long as the training's.
        kept: batches whose logits stay on the GPU, gathered from all ranks and joined, until they go to the host
            (``eval_accumulation_steps``, or all batches without it); 0 where only the loss is kept.
        casts: whether the model's wrapper returns logits in fp32 (accelerate's ``convert_outputs_to_fp32``).
    """

    batch: int
    kept: int = 0
    casts: bool = False
