"""Optimizers by the names that programs have for them: a row of the optimizer table, or what is left out of the plan."""

from __future__ import annotations

from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.unmodelled import Effect
from zeroplan.core.workload import OptimizerKind
from zeroplan.interop.programs.builder import Builder

#: Names that programs beside transformers give to optimizers whose states a row has.
_ALSO = {
    "adamw8bit": "adamw8bit",
    "pagedadamw": "adamw",
    "pagedadamw32bit": "adamw",
    "pagedadamw8bit": "adamw8bit",
    "lion_pytorch": "lion",
    "optimi_adamw": "adamw",
}
#: transformers' and others' names that ask for torch's multi-tensor loops and for its fused kernel.
_FOREACH, _FUSED = ("adamw_torch", "adamw"), ("adamw_torch_fused",)
#: What stands in the plan for an optimizer that is not modelled, and whether that is too much or too little.
_STANDS_IN: dict[str, tuple[str, Effect, str]] = {
    "adamw_torch_8bit": ("adamw8bit", Effect.UNKNOWN, "torchao's 8-bit states are counted as bitsandbytes's"),
    "adamw_torch_4bit": ("adamw8bit", Effect.LESS, "torchao's 4-bit states are counted as 8-bit ones"),
    "lion_8bit": ("lion", Effect.LESS, "8-bit momentum is counted in full width"),
    "paged_lion_8bit": ("lion", Effect.LESS, "8-bit momentum is counted in full width"),
    "rmsprop_bnb": ("rmsprop", Effect.UNKNOWN, "bitsandbytes's step is not measured"),
    "rmsprop_bnb_32bit": ("rmsprop", Effect.UNKNOWN, "bitsandbytes's step is not measured"),
    "rmsprop_bnb_8bit": ("rmsprop", Effect.LESS, "8-bit states are counted in full width"),
    "ademamix": ("adamw", Effect.MORE, "its third moment is not counted"),
    "paged_ademamix_32bit": ("adamw", Effect.MORE, "its third moment is not counted"),
    "ademamix_8bit": ("adamw", Effect.LESS, "three 8-bit moments are counted as two in full width"),
    "paged_ademamix_8bit": ("adamw", Effect.LESS, "three 8-bit moments are counted as two in full width"),
    "adamw_anyprecision": ("adamw", Effect.UNKNOWN, "the dtypes of its states are arguments of its own"),
    "grokadamw": ("adamw", Effect.MORE, "its average of past gradients is not counted"),
    "schedule_free_adamw": ("adamw", Effect.UNKNOWN, "its averaged iterate stands in for a moment; its step is not measured"),
    "schedule_free_radam": ("radam", Effect.UNKNOWN, "its averaged iterate stands in for a moment; its step is not measured"),
    "schedule_free_sgd": ("sgd_momentum", Effect.UNKNOWN, "its averaged iterate is counted as a momentum"),
    "ao_adamw_8bit": ("adamw8bit", Effect.UNKNOWN, "torchao's 8-bit states are counted as bitsandbytes's"),
    "ao_adamw_4bit": ("adamw8bit", Effect.LESS, "torchao's 4-bit states are counted as 8-bit ones"),
    "ao_adamw_fp8": ("adamw8bit", Effect.UNKNOWN, "torchao's 8-bit states are counted as bitsandbytes's"),
    "adopt_adamw": ("adamw", Effect.UNKNOWN, "ADOPT's step is not measured"),
    "came_pytorch": ("adafactor", Effect.MORE, "CAME's momentum and confidence are not counted"),
    "dion": ("muon", Effect.UNKNOWN, "Dion's momentum and factors are counted as Muon's momentum"),
    "sinkgd": ("sgd", Effect.UNKNOWN, "SinkGD's step is not measured"),
    "flash_adamw": ("adamw", Effect.LESS, "compressed states are counted in full width"),
    "flash_adam": ("adam", Effect.LESS, "compressed states are counted in full width"),
    "flash_sgd": ("sgd_momentum", Effect.LESS, "compressed states are counted in full width"),
    "flash_sgdw": ("sgd_momentum", Effect.LESS, "compressed states are counted in full width"),
    "flash_lion": ("lion", Effect.LESS, "compressed states are counted in full width"),
    "q_galore_adamw8bit": ("adamw8bit", Effect.UNKNOWN, "its states follow each matrix's projection rank"),
    "muon": ("muon", Effect.UNKNOWN, "which parameters the program gives to Muon is its own choice"),
    "stable_adamw": ("adamw", Effect.UNKNOWN, "the states of its own package are not measured"),
    "lomo": ("sgd", Effect.LESS, "it steps within the backward, so gradients never stand together"),
    "adalomo": ("adafactor", Effect.LESS, "it steps within the backward, so gradients never stand together"),
    **{
        f"{kind}{layerwise}": (row, Effect.UNKNOWN, "its states follow each matrix's projection rank")
        for kind, row in (
            ("galore_adamw", "adamw"),
            ("galore_adamw_8bit", "adamw8bit"),
            ("galore_adafactor", "adafactor"),
            ("apollo_adamw", "adamw"),
        )
        for layerwise in ("", "_layerwise")
    },
}


def set_optimizer(run: Builder, key: str, *, default: str, note: str = "") -> None:
    """Set the run's optimizer from a key, else the program's default; one without a row stands among what is left out.

    Args:
        run: the builder.
        key: the key that names it.
        default: the program's own default, by its name.
        note: where the default comes from, for the list of what is assumed.
    """
    name = run.word(key)
    if name is None:
        run.assume(f"{key} {default}{note}")
        name = default
    else:
        run.keys["optimizer"] = key
    row, kind = optimizer_of(run, key, name)
    run.set("optimizer", row)
    run.set("optimizer_kind", kind)


def optimizer_of(run: Builder, key: str, name: str) -> tuple[str, str | None]:
    """The row that stands for an optimizer of that name, and how it walks its tensors where the name says.

    Raises:
        BadInput: a name that no program has.
    """
    plain = name.strip().lower().removeprefix("optimizernames.")
    if plain in _STANDS_IN:
        row, effect, says = _STANDS_IN[plain]
        run.leave_out(key, effect, f"{plain}: {says}")
        return row, None
    row = find_optimizer(_ALSO.get(plain, plain), where=f"{run.name}: {key}").name
    if plain.startswith("paged_"):
        run.leave_out(key, Effect.LESS, "paged states may move to the host; they are counted on the GPU")
    kind = OptimizerKind.FUSED if plain in _FUSED else OptimizerKind.FOREACH if plain in _FOREACH else None
    return row, None if kind is None else kind.value
