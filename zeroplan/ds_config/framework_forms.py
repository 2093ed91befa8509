"""An explicit ds_config in the forms that the HF Trainer and Lightning want, with the arguments that belong beside it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from zeroplan.core.optimizers import deepspeed_type
from zeroplan.ds_config.batch import ACCUM, MICRO, TRAIN
from zeroplan.ds_config.sections import HF_FILLS

#: Buckets stay as they are: what the Trainer would derive is not what was planned.
_KEPT = frozenset(path for path in HF_FILLS if path.startswith("zero_optimization."))
#: ds_config paths and the TrainingArguments that fill them.
_TRAINER_ARGUMENTS = {
    MICRO: "per_device_train_batch_size",
    ACCUM: "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
}
#: What every optimizer of a ds_config takes, and what DeepSpeed's Adams take beside it: the Trainer has an argument for each,
#: which without ``auto`` would have no effect.
_EVERY, _ADAM = ("lr", "weight_decay"), ("betas", "eps")


def hf_trainer_form(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config with ``auto`` where the HF Trainer fills, and the TrainingArguments that fill it again.

    Of the optimizer's parameters only those that the config holds are among the arguments; the Trainer's own hold for the rest.

    Source: ``HfTrainerDeepSpeedConfig`` of transformers 5.17 (integrations/deepspeed.py).
    """
    form = copy.deepcopy(dict(config))
    arguments: dict[str, Any] = {}
    optimizer = form.get("optimizer")
    left_open = _left_open(optimizer) if isinstance(optimizer, dict) else {}
    for path in sorted(HF_FILLS - _KEPT):
        *parents, name = path.split(".")
        node: Any = form
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if not isinstance(node, dict) or (parents and name not in node):
            continue
        value = node.get(name)
        if path in _TRAINER_ARGUMENTS and value is not None:
            arguments[_TRAINER_ARGUMENTS[path]] = value
        elif name == "betas" and isinstance(value, list) and len(value) == 2:
            arguments |= {"adam_beta1": value[0], "adam_beta2": value[1]}
        node[name] = "auto"
    if left_open:
        form["optimizer"]["params"] = left_open | form["optimizer"].get("params", {})
    return form, arguments


def _left_open(optimizer: Mapping[str, Any]) -> dict[str, str]:
    """The parameters that the Trainer has arguments for and this optimizer takes."""
    kind = deepspeed_type(str(optimizer.get("type")))
    return dict.fromkeys((*_EVERY, *(_ADAM if kind is not None and kind.adam else ())), "auto")


def lightning_form(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config for ``DeepSpeedStrategy(config=…)``, and the Lightning Trainer's arguments.

    Lightning refuses ``gradient_accumulation_steps`` and sets it from ``accumulate_grad_batches``; it sets precision
    blocks from ``precision`` (pytorch/strategies/deepspeed.py).
    """
    form = copy.deepcopy(dict(config))
    arguments: dict[str, Any] = {"accumulate_grad_batches": form.pop(ACCUM, 1)}
    form.pop(TRAIN, None)
    modes = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
    enabled = [name for name in modes if isinstance(form.get(name), dict) and form[name].get("enabled")]
    arguments["precision"] = modes[enabled[0]] if enabled else "32-true"
    return form, arguments
