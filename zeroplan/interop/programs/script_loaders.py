"""The samples of a pass, by the loaders that a Python script makes."""

from __future__ import annotations

import ast
from typing import Any

from zeroplan.interop.programs.script_reader import Reader
from zeroplan.interop.programs.script_syntax import UNKNOWN, called


def loader_batches(reader: Reader) -> dict[str, int]:
    """``batch_size`` and ``val_batch_size`` of the loaders, those of training by their place where there are several."""
    found: dict[bool, set[int | None]] = {True: set(), False: set()}
    for call in reader.calls:
        if reader.values.name_of(call.func) != "DataLoader":
            continue
        names = [parent.name for parent, _ in reader.values.ancestors(call) if isinstance(parent, ast.FunctionDef)]
        held = [
            called(one)
            for parent, _ in reader.values.ancestors(call)
            if isinstance(parent, ast.Assign)
            for one in parent.targets
        ]
        of = [ast.unparse(one)[:80] for one in call.args[:1]]
        where = " ".join((*(names if not held else names[:1]), *held, *of)).lower()
        if "test" in where or "predict" in where:
            continue
        found["val" in where].add(_batch(reader, call))
    batch: dict[str, int] = {}
    for evaluates, key in ((False, "batch_size"), (True, "val_batch_size")):
        sizes = found[evaluates]
        one = next(iter(sizes)) if len(sizes) == 1 else None
        if one is not None:
            batch[key] = one
    return batch


def _batch(reader: Reader, call: ast.Call) -> int | None:
    """A loader's samples: one where no argument tells; None where the text does not, or a sampler does."""
    words: dict[str, Any] = {key: value for key, value, _ in reader.values.keywords(call)}
    if words.get("batch_sampler") is not None or "**" in words or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    value = reader.values.of(call.args[1]) if len(call.args) > 1 else words.get("batch_size", 1)
    return None if value is UNKNOWN or isinstance(value, bool) or not isinstance(value, int) or value < 1 else value
