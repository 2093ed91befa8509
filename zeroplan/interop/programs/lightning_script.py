"""A Python script that makes Lightning's ``Trainer``: its arguments, its strategy, and what its text tells of the module."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.script import ScriptReader
from zeroplan.interop.programs.script_adapters import take_adapters
from zeroplan.interop.programs.script_deeds import list_deeds
from zeroplan.interop.programs.script_loaders import loader_batches
from zeroplan.interop.programs.script_model import take_model
from zeroplan.interop.programs.script_reader import RunScript, parsed
from zeroplan.interop.programs.script_syntax import UNKNOWN, holds_unknown
from zeroplan.interop.programs.script_values import Values

_PACKAGES = ("lightning", "pytorch_lightning")
#: Arguments of the Trainer that decide memory.
_READ = (
    *("accelerator", "strategy", "devices", "num_nodes", "precision", "accumulate_grad_batches", "limit_val_batches"),
    *("plugins", "callbacks", "barebones"),
)
#: Of a module, what steps or is called by the Trainer in ways of its own.
_OWN_STEPS = ("manual_backward", "configure_gradient_clipping", "optimizer_step", "lr_scheduler_step")


def read_script(
    text: str,
    name: str,
    flags: Mapping[str, Any] | None = None,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> RunScript:
    """Read a script, started with these flags, further words and variables.

    Raises:
        BadInput: it builds no arguments of the HF Trainer and no Trainer of Lightning, or several; it trains by a loop of its
            own; or names are not sure.
    """
    try:
        reader = ScriptReader(Values(parsed(text, name), flags, words, environment), name)
        if _imports_lightning(reader.values):
            return _read(reader)
        return reader.read()
    except RecursionError:
        raise BadInput("has expressions that are nested too deep", where=name, remedy="give the run's arguments") from None


def _imports_lightning(values: Values) -> bool:
    found = [node.module or "" for node in values.nodes if isinstance(node, ast.ImportFrom)]
    found += [one.name for node in values.nodes if isinstance(node, ast.Import) for one in node.names]
    return any(one.partition(".")[0] in _PACKAGES and ".fabric" not in one for one in found)


def _read(reader: ScriptReader) -> RunScript:
    """Read Lightning's run; arguments of the HF Trainer in such a script are another run's."""
    values = reader.values
    if values.opaque:
        reader.refuse(f"binds names in a way that no text tells (line {values.opaque})")
    trainers = reader.named("Trainer")
    if len(trainers) != 1:
        cli = [call for call in reader.calls if values.name_of(call.func) == "LightningCLI"]
        if cli and not trainers:
            reader.refuse(f"takes its arguments from a YAML by LightningCLI (line {cli[0].lineno})")
        lines = ", ".join(str(one.lineno) for one in trainers[:4])
        reader.refuse(f"makes {len(trainers)} Trainers of Lightning" + (f" (lines {lines})" if lines else ""))
    trainer = trainers[0]
    if values.in_loop(trainer):
        reader.refuse(f"trains in a loop (line {trainer.lineno})")
    section: dict[str, Any] = {}
    for key, value, node in values.keywords(trainer):
        if key not in (*_READ, "**"):
            continue
        given = _objects(values, node, value)
        if holds_unknown(given):
            reader.leave_out(f"trainer.{key}", node, Effect.UNKNOWN, f"{ast.unparse(node)[:50]} is not told")
        else:
            section[key] = given
    head = take_model(reader, None, "lightning")
    if "model_name_or_path" not in reader.data and not reader.assumed:
        reader.leave_out("model", trainer, Effect.UNKNOWN, "the script's own model is not read; MODEL is planned in its place")
    take_adapters(reader, None, "lightning")
    list_deeds(reader, None)
    _loaders(reader)
    _own_steps(reader)
    optimizer = _optimizer(reader)
    data = {**reader.data, "trainer": section, **({"optimizer": optimizer} if optimizer else {})}
    if any(isinstance(node, ast.FunctionDef) and node.name == "configure_model" for node in values.nodes):
        data["configure_model"] = True
    return reader.found("lightning", data, head=head)


def _objects(values: Values, node: ast.expr, value: Any) -> Any:
    """A value as LightningCLI's YAML would have it: objects by their class and arguments; callbacks by their class alone."""
    made = values.node(node)
    if isinstance(made, ast.Call):
        words = {
            key: True if isinstance(item, ast.Name | ast.Set) and one is UNKNOWN else one
            for key, one, item in values.keywords(made)
        }
        changed = isinstance(node, ast.Name) and values.changed(node.id)
        positional = bool(made.args) and values.name_of(made.func).endswith("Strategy")
        if not changed and not positional and "**" not in words and values.name_of(made.func)[:1].isupper():
            plain = words if values.name_of(made.func).endswith("Strategy") else {}
            return {"class_path": values.name_of(made.func), "init_args": plain}
        return value
    if isinstance(made, ast.List) and value is UNKNOWN:
        return [_objects(values, one, values.of(one)) for one in made.elts]
    return value


def _loaders(reader: ScriptReader) -> None:
    """Take the samples of a pass from the loaders, and the length to which samples are cut."""
    batch = loader_batches(reader)
    lengths = reader.cut_lengths()
    if len(lengths) == 1:
        (batch["max_length"],) = lengths
    reader.data["data"] = batch


def _own_steps(reader: ScriptReader) -> None:
    """Say where a module's step is more than its model's own loss."""
    for node in reader.values.nodes:
        if isinstance(node, ast.FunctionDef) and node.name in _OWN_STEPS:
            reader.leave_out(node.name, node, Effect.UNKNOWN, "the module's own way of a step is not read")
        if isinstance(node, ast.FunctionDef) and node.name == "training_step":
            inner = list(ast.walk(node))
            if not any(isinstance(one, ast.Attribute) and one.attr == "loss" for one in inner):
                reader.leave_out(
                    "training_step", node, Effect.UNKNOWN, "a loss of its own is not read; the model's own is counted"
                )
        if isinstance(node, ast.Attribute) and node.attr == "automatic_optimization" and isinstance(node.ctx, ast.Store):
            reader.leave_out("automatic_optimization", node, Effect.UNKNOWN, "the module's own way of a step is not read")


def _optimizer(reader: ScriptReader) -> str:
    """The class of the one optimizer that ``configure_optimizers`` makes; empty where the text does not tell one."""
    made = []
    for node in reader.values.nodes:
        if isinstance(node, ast.FunctionDef) and node.name == "configure_optimizers":
            made += [reader.values.name_of(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)]
    found = {one for one in made if one.lower().removeprefix("deepspeedcpu").removeprefix("fused") in _ROWS}
    return found.pop() if len(found) == 1 else ""


_ROWS = frozenset(("adam", "adamw", "sgd", "adafactor", "lion", "adagrad", "rmsprop", "adamw8bit", "adam8bit", "muon"))
