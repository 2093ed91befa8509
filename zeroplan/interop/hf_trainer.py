"""transformers' TrainingArguments, as JSON, YAML or the object itself: what a run with them does.

Source: transformers 5.17 ``training_args.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.ds_config.forms import trainer_form
from zeroplan.interop.setups import Keys, Setup, optimizer_of, precision_of

#: ``per_device_train_batch_size`` where it is not given.
DEFAULT_MICRO_BATCH = 8


def read_training_arguments(data: Mapping[str, Any], name: str) -> Setup:
    """The run that these arguments describe: DeepSpeed with a ds_config, FSDP where asked for, else DDP.

    Raises:
        BadInput: values of wrong types, or a ds_config that is not there.
    """
    keys = Keys(data, name)
    ds_config = keys.ds_config("deepspeed")
    sharded = bool(data.get("fsdp"))
    return Setup(
        kind="TrainingArguments",
        engine="deepspeed" if ds_config is not None else "fsdp2" if sharded else "ddp",
        micro_batch=keys.number("per_device_train_batch_size", DEFAULT_MICRO_BATCH),
        grad_accum=keys.number("gradient_accumulation_steps", 1),
        dtype=precision_of(keys),
        optimizer=optimizer_of(keys.text("optim")),
        gradient_checkpointing=keys.flag("gradient_checkpointing", False),
        ds_config=ds_config,
        notes=("auto_find_batch_size lowers the batch when memory runs out",) if keys.flag("auto_find_batch_size") else (),
    )


def training_arguments(config: Mapping[str, Any], *, gradient_checkpointing: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """An explicit ds_config in the form for the HF Trainer (``auto`` where it fills), and the arguments that belong to it."""
    form, arguments = trainer_form(config)
    return form, arguments | {"gradient_checkpointing": gradient_checkpointing}
