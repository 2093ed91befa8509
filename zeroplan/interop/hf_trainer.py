"""The HF Trainer's form of a ds_config: ``auto`` where it fills, and the TrainingArguments that belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.ds_config.framework_forms import hf_trainer_form


def training_arguments(config: Mapping[str, Any], *, gradient_checkpointing: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """An explicit ds_config in the form for the HF Trainer (``auto`` where it fills), and the arguments that belong to it."""
    form, arguments = hf_trainer_form(config)
    return form, arguments | {"gradient_checkpointing": gradient_checkpointing}
