"""Finds out which program wrote a file, and reads it as a :class:`~zeroplan.interop.setups.Setup`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from zeroplan.core.documents import read_document
from zeroplan.core.errors import BadInput
from zeroplan.ds_config.source import load_source
from zeroplan.interop import accelerate, axolotl, hf_trainer, llama_factory
from zeroplan.interop.setups import Setup


def read_setup(source: Any) -> Setup:
    """What a file or an object says: a ds_config, TrainingArguments, or a file of accelerate, axolotl or LLaMA-Factory.

    Args:
        source: a path, a mapping, or a ``transformers.TrainingArguments``.

    Raises:
        BadInput: when it cannot be read, holds values of wrong types, or is none of these.
    """
    name = "--from"
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        data: Mapping[str, Any] = read_document(name)
    elif isinstance(source, Mapping):
        data = source
    elif callable(getattr(source, "to_dict", None)):
        data, name = source.to_dict(), type(source).__name__
    else:
        raise BadInput(f"a {type(source).__name__} is no configuration", where=name, remedy="give a path, a dict or arguments")
    return _reader(data, name)(data, name)


def _reader(data: Mapping[str, Any], name: str) -> Callable[[Mapping[str, Any], str], Setup]:
    if "zero_optimization" in data or "train_micro_batch_size_per_gpu" in data or "train_batch_size" in data:
        return _plain_ds_config
    if "distributed_type" in data or "compute_environment" in data:
        return accelerate.read_accelerate
    if "base_model" in data:
        return axolotl.read_axolotl
    if "model_name_or_path" in data:
        return llama_factory.read_llama_factory
    if any(key in data for key in ("per_device_train_batch_size", "output_dir", "deepspeed", "gradient_accumulation_steps")):
        return hf_trainer.read_training_arguments
    raise BadInput(
        "is no configuration that is known",
        where=name,
        remedy="give a ds_config, TrainingArguments, or a file of accelerate, axolotl or LLaMA-Factory",
    )


def _plain_ds_config(data: Mapping[str, Any], name: str) -> Setup:
    return Setup(kind="ds_config", ds_config=load_source(data)[0])
