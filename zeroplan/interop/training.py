"""What a program's file says of how its run trains: rates, decays, schedules and lengths of a run move no memory, so no plan
holds them. The files that ``recommend`` writes carry what their form can say; the rest is named.

Source of the Trainer's names: transformers 5.17, ``training_args.py``; of the others, each program's own arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.optimizers import deepspeed_type

#: The Trainer's names, each with the names and nested keys by which programs say the same.
_NAMES: dict[str, tuple[str, ...]] = {
    "learning_rate": ("learning_rate", "lr", "optimizer.lr", "optimizer.init_args.lr", "optimizer.params.lr"),
    "weight_decay": (
        *("weight_decay", "optimizer.weight_decay", "optimizer.init_args.weight_decay"),
        "optimizer.params.weight_decay",
    ),
    "adam_beta1": ("adam_beta1", "optimizer.beta1"),
    "adam_beta2": ("adam_beta2", "optimizer.beta2"),
    "adam_epsilon": ("adam_epsilon", "adam_eps", "optimizer.eps", "optimizer.init_args.eps", "optimizer.params.eps"),
    "max_grad_norm": (
        *("max_grad_norm", "gradient_clipping", "clip_grad_norm", "clip_grad", "training.max_norm", "train.max_norm"),
        "trainer.gradient_clip_val",
    ),
    "lr_scheduler_type": ("lr_scheduler_type",),
    "lr_scheduler_kwargs": ("lr_scheduler_kwargs",),
    "warmup_ratio": ("warmup_ratio",),
    "warmup_steps": ("warmup_steps",),
    "num_train_epochs": ("num_train_epochs", "num_epochs"),
    "max_steps": ("max_steps",),
    "seed": ("seed",),
    "lora_alpha": ("lora_alpha",),
    "lora_dropout": ("lora_dropout",),
}
#: Of adapters: values that no arguments of the Trainer hold.
ADAPTERS = ("lora_alpha", "lora_dropout")
_BETAS = ("optimizer.betas", "optimizer.init_args.betas", "optimizer.params.betas")
#: Names by which programs say what moves training and the Trainer has no argument for, or no equal one.
_OTHERS = (
    *("lr_scheduler", "min_lr", "lr_decay_style", "lr_warmup_fraction", "lr_warmup_iters", "train_iters", "train_samples"),
    *("epochs", "max_steps_per_epoch", "training.steps", "train.lr_warmup_steps", "train.max_tokens", "train.epochs"),
    *("train.max_steps", "train.min_lr", "num_warmup_steps", "max_train_steps", "trainer.max_epochs", "trainer.max_steps"),
    *("data_seed", "optim_args", "label_smoothing_factor", "neftune_noise_alpha", "embedding_learning_rate"),
    *("loraplus_lr_ratio", "use_rslora", "beta", "pref_beta", "loss_type", "pref_loss"),
    *("simpo_gamma", "rpo_alpha", "temperature", "num_generations", "epsilon", "completion_only_loss", "train_on_inputs"),
    *("assistant_only_loss", "group_by_length", "initial_loss_scale", "sgd_momentum", "loss_scale"),
)
#: Values that are texts or mappings; all others are numbers.
_WORDS = ("lr_scheduler_type", "lr_scheduler_kwargs")
#: Of the optimizer's own parameters: the Trainer's name, the key of a ds_config, and whether Adam's kind alone has it.
_PARAMETERS = (("learning_rate", "lr", False), ("weight_decay", "weight_decay", False), ("adam_epsilon", "eps", True))
#: The Trainer's betas, for a file that says one of the two.
_BETA1, _BETA2 = 0.9, 0.999


@dataclass(frozen=True, slots=True)
class Training:
    """What a file says of a run's training beside what a plan holds.

    Attributes:
        file: that says it; empty where no file was read.
        values: by the Trainer's names.
        scheduler: the block of a ds_config.
        others: what else moves training, by the file's own names, with the values.
        rest: arguments of the file that move neither memory nor training: data, output, logging.
    """

    file: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    rest: tuple[str, ...] = ()

    def over(self, other: Training) -> Training:
        """Return both together; where both say a value, this one's."""
        return Training(
            self.file or other.file,
            {**other.values, **self.values},
            self.scheduler or other.scheduler,
            {**other.others, **self.others},
            self.rest or other.rest,
        )

    def left_out(self, taken: Iterable[str], *, scheduled: bool = False) -> tuple[str, ...]:
        """Return the note on what the written files do not hold; `taken` are the values that they do, and `scheduled` whether
        they have the schedule.
        """
        held = set(taken)
        missing = {name: value for name, value in {**self.values, **self.others}.items() if name not in held}
        if self.scheduler is not None and scheduled:
            missing.pop("warmup_steps", None)
        elif self.scheduler is not None:
            missing["scheduler"] = self.scheduler["type"]
        if not missing:
            return ()
        said = ", ".join(f"{name} {_shown(value)}" for name, value in missing.items())
        return (f"{self.file} says, and no written file does: {said}; set them in your program",)


#: Of a run that no file describes.
NO_TRAINING = Training()


def _betas(said: Any) -> dict[str, Any]:
    """Return Adam's two coefficients of a pair of numbers; nothing of anything else."""
    pair = [_number(one) for one in said] if isinstance(said, list | tuple) and len(said) == 2 else []
    return {} if not pair or None in pair else {"adam_beta1": pair[0], "adam_beta2": pair[1]}


def read_training(data: Mapping[str, Any], name: str, known: Iterable[str] | None = None) -> Training:
    """Read what a document says of its run's training; variables, and values of other types, are left to be named.

    Args:
        name: of its file.
        known: the keys that are read elsewhere; None where its other keys are none of a command's arguments.
    """
    values: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for ours, names in _NAMES.items():
        for key in names:
            said = _at(data, key)
            if said is None:
                continue
            value = _word(said) if ours in _WORDS else _number(said)
            if value is None:
                others[key] = said
            else:
                values.setdefault(ours, value)
    for key in _BETAS:
        said = _at(data, key)
        pair = _betas(said)
        values |= pair
        if said is not None and not pair:
            others[key] = said
    others |= {key: said for key in _OTHERS if (said := _at(data, key)) is not None and said is not False}
    scheduler = data.get("scheduler")
    block = dict(scheduler) if isinstance(scheduler, Mapping) and isinstance(scheduler.get("type"), str) else None
    if block is not None and (steps := _number(_at(block, "params.warmup_num_steps"))) is not None:
        values.setdefault("warmup_steps", steps)  # the Trainer refuses other ones than the schedule's
    held = {key for names in _NAMES.values() for key in names}.union(_OTHERS, known or ())
    rest = () if known is None else tuple(key for key in data if key not in held and data[key] not in (None, False, ""))
    return Training(name, values, block, others, rest)


def trained_config(config: Mapping[str, Any], training: Training) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return an explicit ds_config with the optimizer's parameters, the clipping and the schedule of a file, and the names of
    the values that it now holds. A schedule with values left open (``auto``) is not written.
    """
    found, taken = dict(config), []
    optimizer = found.get("optimizer")
    if isinstance(optimizer, Mapping):
        kind = deepspeed_type(str(optimizer.get("type")))
        adam = kind is not None and kind.adam
        own = {key: training.values[name] for name, key, of_adam in _PARAMETERS if name in training.values and adam >= of_adam}
        taken += [name for name, key, _ in _PARAMETERS if key in own]
        betas = [name for name in ("adam_beta1", "adam_beta2") if name in training.values]
        if betas and adam:
            own["betas"] = [training.values.get("adam_beta1", _BETA1), training.values.get("adam_beta2", _BETA2)]
            taken += betas
        if own:
            found["optimizer"] = {**optimizer, "params": {**optimizer.get("params", {}), **own}}
    if "max_grad_norm" in training.values:
        found["gradient_clipping"] = training.values["max_grad_norm"]
        taken.append("max_grad_norm")
    if training.scheduler is not None and not _holds_auto(training.scheduler):
        found["scheduler"] = dict(training.scheduler)
    return found, tuple(taken)


def trained_optimizer(name: str, training: Training) -> dict[str, Any]:
    """Return the arguments of a class of ``torch.optim`` that a file says, by torch's names."""
    adam = name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
    own = {key: training.values[ours] for ours, key, of_adam in _PARAMETERS if ours in training.values and adam >= of_adam}
    if adam and {"adam_beta1", "adam_beta2"} & training.values.keys():
        own["betas"] = (training.values.get("adam_beta1", _BETA1), training.values.get("adam_beta2", _BETA2))
    return own


def taken_by_optimizer(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the Trainer's names of what a class of ``torch.optim`` is given."""
    taken = [name for name, key, _ in _PARAMETERS if key in arguments]
    return (*taken, *(("adam_beta1", "adam_beta2") if "betas" in arguments else ()))


def _at(data: Mapping[str, Any], path: str) -> Any:
    value: Any = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value in ("auto", "", "none", "None") else value


def _number(value: Any) -> int | float | None:
    """A number, also one that YAML reads as a text (``1e-5``)."""
    if isinstance(value, str):
        convert: Callable[[str], float] = float
        try:
            return convert(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _word(value: Any) -> Any:
    return value if isinstance(value, Mapping) or (isinstance(value, str) and "$" not in value) else None


def _holds_auto(block: Any) -> bool:
    return any(_holds_auto(one) for one in block.values()) if isinstance(block, Mapping) else block == "auto"


def _shown(value: Any) -> str:
    return str(value)[:40]
