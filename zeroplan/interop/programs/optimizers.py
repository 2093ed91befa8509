"""Optimizers by the names that programs have for them: a row of the optimizer table, or what is left out of the plan."""

from __future__ import annotations

from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.unmodelled import Effect
from zeroplan.core.unmodelled_optimizers import unmodelled_optimizer
from zeroplan.core.workload import OptimizerKind
from zeroplan.interop.programs.builder import Builder

#: Names for which the Trainer, and programs on it, have a class of their own.
_TRAINERS = {"adafactor": "adafactor_transformers"}
#: transformers' and others' names that ask for torch's multi-tensor loops and for its fused kernel.
_FOREACH, _FUSED = ("adamw_torch", "adamw"), ("adamw_torch_fused",)


def set_optimizer(run: Builder, key: str, *, default: str, note: str = "") -> None:
    """Set the run's optimizer from a key, else the program's default; one without a row stands among what is left out.

    Args:
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
    """Return the row that stands for an optimizer of that name, and how it walks its tensors where the name says.

    Raises:
        BadInput: a name that no program has.
    """
    plain = name.strip().lower().removeprefix("optimizernames.")
    other = unmodelled_optimizer(plain)
    if other is not None and other.stands_in:
        run.leave_out(key, other.effect, f"{plain} is planned as {other.stands_in}: {other.why}")
        return other.stands_in, None
    row = find_optimizer(_TRAINERS.get(plain, plain), where=f"{run.name}: {key}")
    if row.rest:
        run.leave_out(key, Effect.UNKNOWN, f"{plain}: which parameters the program gives to it is its own choice")
    if plain.startswith("paged"):
        run.leave_out(key, Effect.LESS, "paged states may move to the host; they are counted on the GPU")
    kind = OptimizerKind.FUSED if plain in _FUSED else OptimizerKind.FOREACH if plain in _FOREACH else None
    return row.name, None if kind is None else kind.value
