"""A Python script that builds DeepSpeed's ``PipelineModule``: what its text says of stages, model and configuration.

Nothing of it is run or imported; :mod:`zeroplan.interop.programs.script_values` tells what is known. Calls of
``PipelineModule`` and of its subclasses' ``super().__init__`` tell the stages.

Source: DeepSpeed 0.19.8, runtime/pipe/module.py (PipelineModule.__init__), deepspeed/__init__.py (initialize)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.interop.programs.script_reader import parsed
from zeroplan.interop.programs.script_syntax import called
from zeroplan.interop.programs.script_values import Values

_CLASS = "PipelineModule"
#: Topologies that tell the stages, first.
_TOPOLOGIES = ("PipeDataParallelTopology", "PipeModelDataParallelTopology")
_SHORT = re.compile(r"-[A-Za-z]")


@dataclass(frozen=True, slots=True)
class PipelineScript:
    """What a script's text says.

    Attributes:
        stages: of the pipeline.
        partition: ``partition_method``; None for the default.
        interval: ``activation_checkpoint_interval``.
        model: the id or path that the script loads; None where no text names one alone.
        config: what ``deepspeed.initialize`` is given: an object, or a path; None where the text does not tell.
        defaults: the parser's arguments whose defaults were taken, by name.
        gpus: a node, where the command line says.
        nodes: where the command line says.
    """

    stages: int
    partition: str | None = None
    interval: int = 0
    model: str | None = None
    config: Mapping[str, Any] | str | None = None
    defaults: tuple[str, ...] = ()
    gpus: int | None = None
    nodes: int | None = None


def read_pipeline_script(
    text: str, name: str, flags: Mapping[str, Any] | None = None, words: Sequence[str] = ()
) -> PipelineScript:
    """Read a script, started with these flags by their long names, and further words.

    Raises:
        BadInput: a text that is no Python, builds no PipelineModule or several, or does not tell the number of stages.
    """
    values = Values(parsed(text, name), *_short_apart(flags or {}, words))
    built = list(_built(values.nodes))
    if not built:
        raise BadInput(
            "is a Python script, of which a PipelineModule alone is read, and it builds none",
            where=name,
            remedy="give the command line that starts it in a .sh file, or its ds_config",
        )
    found = {_stages(call, values, name): call for call in built}
    if len(found) > 1:
        raise BadInput(f"builds PipelineModules of {' and '.join(map(str, found))} stages", where=name, remedy="leave one")
    ((stages, call),) = found.items()
    partition = _literal(call, values, "partition_method", 7, str, name)
    interval = _literal(call, values, "activation_checkpoint_interval", 8, int, name)
    return PipelineScript(
        stages=stages,
        partition=partition,
        interval=int(interval or 0),
        model=_model(values),
        config=_config(values),
        defaults=tuple(sorted(values.taken)),
    )


def _short_apart(flags: Mapping[str, Any], words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return long flags, and further words with the short ones that stand behind a long one's values."""
    long, rest = dict(flags), [str(word) for word in words]
    for name, value in flags.items():
        values = value if isinstance(value, list) else [value]
        cut = next((at for at, one in enumerate(values) if isinstance(one, str) and _SHORT.fullmatch(one)), None)
        if cut is not None:
            long[name] = values[:cut] if cut > 1 else values[0] if cut else True
            rest += [str(one) for one in values[cut:]]
    return long, rest


def _literal(call: ast.Call, values: Values, key: str, place: int, kind: type, where: str) -> Any:
    """An argument's value; None where it is not given. Raises BadInput: the text does not tell it."""
    given = _argument(call, key, place)
    value = None if given is None else values.of(given)
    if given is not None and not isinstance(value, kind):
        shown = ast.unparse(given)[:60]
        raise BadInput(f"{key} ({shown}) is nothing that the text tells", where=where, remedy=_remedy("STAGES"))
    return value


def _remedy(stages: str) -> str:
    return f"plan it by flags: MODEL --engine deepspeed --pp {stages} --partition METHOD"


def _built(nodes: list[ast.AST]) -> Iterator[ast.Call]:
    """Yield the calls that make a PipelineModule."""
    for node in nodes:
        if isinstance(node, ast.Call) and called(node.func) == _CLASS:
            yield node
        if isinstance(node, ast.ClassDef) and any(called(base) == _CLASS for base in node.bases):
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Call)
                    and called(inner.func) == "__init__"
                    and isinstance(inner.func, ast.Attribute)
                    and isinstance(inner.func.value, ast.Call)
                    and called(inner.func.value.func) == "super"
                ):
                    yield inner


def _argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    """A call's argument by its name or its place."""
    found = next((one.value for one in call.keywords if one.arg == name), None)
    plain = call.args if not any(isinstance(one, ast.Starred) for one in call.args) else []
    return found if found is not None or place >= len(plain) else plain[place]


def _stages(call: ast.Call, values: Values, where: str) -> int:
    """The number of stages, said or of the topology.

    Raises:
        BadInput: it is no number that the text tells, or the topology also shares matrices.
    """
    said, topology = _argument(call, "num_stages", 1), _argument(call, "topology", 2)
    made = values.node(topology)
    if said is None and isinstance(made, ast.Call) and called(made.func) in _TOPOLOGIES:
        said = _argument(made, "num_pp", 0)
        if called(made.func) == "PipeModelDataParallelTopology" and values.of(_argument(made, "num_mp", 1)) != 1:
            raise BadInput("a topology with num_mp beside pipeline stages is not modelled", where=where, remedy="use num_mp 1")
    value = values.of(said)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        shown = ast.unparse(said)[:60] if said is not None else "missing"
        raise BadInput(f"num_stages ({shown}) is no number that the text tells", where=where, remedy=_remedy("STAGES"))
    return value


def _model(values: Values) -> str | None:
    """The one model that the script loads by ``from_pretrained``; tokenizers aside."""
    found: set[Any] = set()
    for node in values.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"):
            continue
        if "Tokenizer" in called(node.func.value) or "Processor" in called(node.func.value):
            continue
        value = values.of(_argument(node, "pretrained_model_name_or_path", 0))
        found.add(value if isinstance(value, str) else None)
    return found.pop() if len(found) == 1 else None


def _config(values: Values) -> Mapping[str, Any] | str | None:
    """What the one call of ``deepspeed.initialize`` is given as its configuration."""
    calls = [node for node in values.nodes if isinstance(node, ast.Call) and called(node.func) == "initialize"]
    for call in calls:
        for key in ("config", "config_params"):
            given = next((one.value for one in call.keywords if one.arg == key), None)
            value = values.of(given)
            if isinstance(value, Mapping | str):
                return value
            loaded = values.node(given)
            if isinstance(loaded, ast.Call) and called(loaded.func) == "load" and loaded.args:
                opened = _opened(values, loaded.args[0])
                path = values.of(opened.args[0]) if isinstance(opened, ast.Call) and opened.args else None
                if isinstance(path, str):
                    return path
    value = values.flag("deepspeed_config")
    return value if isinstance(value, str) else None


def _opened(values: Values, node: ast.expr) -> ast.expr | None:
    """Return the call that opens a file, also by the name that one ``with`` gives it."""
    items = (one for one in values.nodes if isinstance(one, ast.withitem) and isinstance(one.optional_vars, ast.Name))
    named = [one.context_expr for one in items if isinstance(node, ast.Name) and called(one.optional_vars) == node.id]
    return named[0] if len(named) == 1 else values.node(node)
