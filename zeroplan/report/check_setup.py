"""The answer of ``check`` on other programs' files: what each key decides, what is assumed, and what plans leave out."""

from __future__ import annotations

from typing import Any

from zeroplan.interop.setups import Setup
from zeroplan.planner.describe import describe_setup
from zeroplan.planner.merge import left_out
from zeroplan.report.table import render
from zeroplan.report.terminal import PLAIN, Terminal

_BY_PROGRAM = "follows from the program"
#: Fields of a Setup that are shown, in this order; the rest describes the file itself.
_FIELDS = (
    *("model", "task", "method", "micro_batch", "grad_accum", "seq_len", "dtype", "model_dtype", "optimizer"),
    *(
        "optimizer_kind",
        "attn",
        "gradient_checkpointing",
        "offload_checkpoints",
        "lora_rank",
        "lora_targets",
        "quantize",
        "fp8",
        "compile",
    ),
    *("engine", "stage", "offload_optimizer", "offload_param", "zero_init", "gpus", "nodes"),
)


def setup_json(setup: Setup) -> dict[str, Any]:
    """The setup as one object that JSON can hold."""
    fields = [{"field": name, "value": value, "key": setup.ask.source(name)} for name, value in _fields_of(setup)]
    missing = [{"key": one.key, "effect": one.effect.value, "says": one.says} for one in left_out(setup)]
    return {**describe_setup(setup), "fields": fields, "unmodelled": missing}


def setup_text(setup: Setup, terminal: Terminal = PLAIN, *, line: bool = True, table: bool = True) -> str:
    """Return the setup's line, a table of what was read with the keys that said it, and what plans leave out."""
    lines = terminal.verdict(setup.line, None) if line else []
    if table:
        lines += _table(setup, terminal)
    if missing := left_out(setup):
        lines += [""] if lines else []
        lines += [terminal.bold(f"Left out of plans ({len(missing)}), with what that does to the memory")]
        lines += terminal.items([f"{one.key} ({one.effect.value}): {one.says}" for one in missing])
    return "\n".join(lines)


def _table(setup: Setup, terminal: Terminal) -> list[str]:
    rows = [
        [name, ", ".join(value) if isinstance(value, list) else str(value), setup.ask.source(name) or _BY_PROGRAM]
        for name, value in _fields_of(setup)
    ]
    table = render(["what", "value", "key"], rows, "plain", width=terminal.width).splitlines()
    return ["", terminal.bold(table[0]), *table[1:]]


def _fields_of(setup: Setup) -> list[tuple[str, Any]]:
    values = ((name, setup.value(name)) for name in _FIELDS)
    return [(name, list(value) if isinstance(value, tuple) else value) for name, value in values if value not in (None, "", ())]
