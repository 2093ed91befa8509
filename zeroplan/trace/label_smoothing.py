"""The loss of transformers' label smoother over a model's logits, operator by operator.

The Trainer hands the model no labels and keeps what it returns until the loss is there. Source: transformers 5.17,
``trainer.py`` (compute_loss), ``trainer_pt_utils.py`` (LabelSmoother); accelerate 1.15, ``utils/operations.py``
(ConvertOutputsToFp32).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_IGNORED = -100


def smoothed_loss(model: Any, batch: Mapping[str, Any], *, wide: bool) -> torch.Tensor:
    """Run the model, and return the smoothed loss of its logits.

    Args:
        model: one whose batches have `labels`, a number for each row of its logits.
        batch: the keyword arguments of its forward.
        wide: whether the wrapper around the model makes what it returns fp32.
    """
    inputs = dict(batch)
    labels = inputs.pop("labels")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.is_encoder_decoder:  # the collator makes them of the labels
        inputs["decoder_input_ids"] = torch.empty_like(labels)
    returned = model(**inputs)
    if wide:
        returned = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in returned.items()}
    logits = returned["logits"]
    if type(base).__name__.endswith("ForCausalLM"):
        logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    logs = -nn.functional.log_softmax(logits, dim=-1)
    labels = labels.unsqueeze(-1)
    ignored = labels.eq(_IGNORED)
    labels = torch.clamp(labels, min=0)
    picked = logs.gather(dim=-1, index=labels)
    smooth = logs.sum(dim=-1, keepdim=True, dtype=torch.float32)
    picked.masked_fill_(ignored, 0.0)
    smooth.masked_fill_(ignored, 0.0)
    loss: torch.Tensor = 0.9 * picked.sum() + 0.1 * smooth.sum()
    return loss
