"""The engine's ds_config, completed by the Trainer's settings, and what a LightningModule must not do under an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan.ds_config.source import load_source
from zeroplan_runtime.integrations.lightning.precision import SECTIONS


def engine_config(
    source: Mapping[str, Any] | str | Path, precision: str, trainer: Any, *, fits: bool, namespace: str
) -> dict[str, Any]:
    """Returns the ds_config for an engine.

    Args:
        source: the user's, as an object or the path of its JSON.
        precision: Lightning's word for the dtypes.
        trainer: gives accumulation, clipping and the size of a batch.
        fits: whether the engine is to train; else optimizer and schedule are left out.
        namespace: the package of Lightning.

    Raises:
        BadInput: where the config and the Trainer contradict each other, and for what the engine does not do.
    """
    config = dict(load_source(source)[0])
    section = SECTIONS[precision]
    if section is not None:
        config[section] = {**config.get(section, {}), "enabled": True}
    config.setdefault("train_micro_batch_size_per_gpu", _batch_size(trainer) if fits else 1)
    if not fits:
        for name in ("optimizer", "scheduler", "gradient_accumulation_steps", "train_batch_size"):
            config.pop(name, None)
        return config
    _require_plain_hooks(trainer, namespace)
    _agree(config, "gradient_accumulation_steps", trainer.accumulate_grad_batches, "accumulate_grad_batches")
    if trainer.gradient_clip_val:
        if trainer.gradient_clip_algorithm not in (None, "norm"):
            raise BadInput(
                "gradients are clipped by their norm only", where="Trainer(gradient_clip_algorithm)", remedy="use 'norm'"
            )
        _agree(config, "gradient_clipping", float(trainer.gradient_clip_val), "gradient_clip_val")
    else:
        config.setdefault("gradient_clipping", 0.0)  # DeepSpeed's default is 1
    return config


def _agree(config: dict[str, Any], key: str, value: Any, argument: str) -> None:
    if config.setdefault(key, value) == "auto":
        config[key] = value
    if config[key] != value:
        raise BadInput(
            f"is {config[key]} and Trainer({argument}) is {value}", where=f"config.{key}", remedy="leave it out of the config"
        )


def _batch_size(trainer: Any) -> int:
    """Returns the samples in a rank's batch, as far as the loader says; the engine only reports it."""
    source = trainer.fit_loop._data_source
    loader = source.dataloader() if source.is_defined() else None
    return int(getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 1)


def _require_plain_hooks(trainer: Any, namespace: str) -> None:
    """Checks that the module overrides nothing that the engine takes over.

    Raises:
        BadInput: that names the method.
    """
    module = trainer.lightning_module
    is_overridden = import_module(f"{namespace}.utilities.model_helpers").is_overridden
    base = import_module(namespace).LightningModule
    if is_overridden("backward", module, base):
        raise BadInput(
            "LightningModule.backward is overridden, but the engine computes the gradients", where="ZeroplanStrategy"
        )
    if trainer.gradient_clip_val and is_overridden("configure_gradient_clipping", module, base):
        raise BadInput(
            "LightningModule.configure_gradient_clipping is overridden, but the engine clips in every step",
            where="Trainer(gradient_clip_val)",
            remedy="leave one of the two out",
        )


def require_one_optimizer(made: Sequence[Any], config: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """Returns the optimizer of ``configure_optimizers``; None where the config names it.

    Raises:
        BadInput: when there are several, or none, or one in both places.
    """
    real = [one for one in made if type(one).__name__ != "_MockOptimizer"]  # Lightning's stand-in for none
    named = "optimizer" in config
    if len(real) + named == 1:
        return real[0] if real else None
    if named:
        what, remedy = "both the config and configure_optimizers() name an optimizer", "leave one of them out"
    elif real:
        what, remedy = f"configure_optimizers() gives {len(real)} optimizers", "give one, with parameter groups"
    else:
        what, remedy = "there is no optimizer", "return one from configure_optimizers(), or name it in the config"
    raise BadInput(what, where="ZeroplanStrategy", remedy=remedy)
