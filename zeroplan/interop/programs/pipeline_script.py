"""A Python script that builds DeepSpeed's ``PipelineModule``: what its text says of stages, model and configuration.

Nothing of it is run or imported. Known are literals, names that are given one literal alone, a parser's arguments, of which
the command line's count, else the defaults, and parameters of functions, of which the defaults do where no call gives others.
Calls of ``PipelineModule`` and of its subclasses' ``super().__init__`` tell the stages.

Source: DeepSpeed 0.19.8, runtime/pipe/module.py (PipelineModule.__init__), deepspeed/__init__.py (initialize)
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput

_CLASS = "PipelineModule"
#: Topologies that tell the stages, first.
_TOPOLOGIES = ("PipeDataParallelTopology", "PipeModelDataParallelTopology")
_UNKNOWN = object()
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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadInput("is no Python that can be parsed", where=name, remedy="mend it, or give the ds_config") from None
    nodes = list(ast.walk(tree))
    built = list(_built(nodes))
    if not built:
        raise BadInput(
            "is a Python script, of which a PipelineModule alone is read, and it builds none",
            where=name,
            remedy="give the command line that starts it in a .sh file, or its ds_config",
        )
    names = _Names(nodes, *_short_apart(flags or {}, words))
    found = {_stages(call, names, name): call for call in built}
    if len(found) > 1:
        raise BadInput(f"builds PipelineModules of {' and '.join(map(str, found))} stages", where=name, remedy="leave one")
    ((stages, call),) = found.items()
    partition = _literal(call, names, "partition_method", 7, str, name)
    interval = _literal(call, names, "activation_checkpoint_interval", 8, int, name)
    return PipelineScript(
        stages=stages,
        partition=partition,
        interval=int(interval or 0),
        model=_model(nodes, names),
        config=_config(nodes, names),
        defaults=tuple(sorted(names.taken)),
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


def _literal(call: ast.Call, names: _Names, key: str, place: int, kind: type, where: str) -> Any:
    """An argument's value; None where it is not given. Raises BadInput: the text does not tell it."""
    given = _argument(call, key, place)
    value = names.of(given)
    if given is not None and not isinstance(value, kind):
        shown = ast.unparse(given)[:60]
        raise BadInput(f"{key} ({shown}) is nothing that the text tells", where=where, remedy=_remedy("STAGES"))
    return value


def _remedy(stages: str) -> str:
    return f"plan it by flags: MODEL --engine deepspeed --pp {stages} --partition METHOD"


def _called(node: ast.expr) -> str:
    """The last name of what is called or inherited: ``PipelineModule`` of ``deepspeed.pipe.PipelineModule``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _built(nodes: list[ast.AST]) -> Iterator[ast.Call]:
    """Yield the calls that make a PipelineModule."""
    for node in nodes:
        if isinstance(node, ast.Call) and _called(node.func) == _CLASS:
            yield node
        if isinstance(node, ast.ClassDef) and any(_called(base) == _CLASS for base in node.bases):
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Call)
                    and _called(inner.func) == "__init__"
                    and isinstance(inner.func, ast.Attribute)
                    and isinstance(inner.func.value, ast.Call)
                    and _called(inner.func.value.func) == "super"
                ):
                    yield inner


def _argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    """A call's argument by its name or its place."""
    found = next((one.value for one in call.keywords if one.arg == name), None)
    plain = call.args if not any(isinstance(one, ast.Starred) for one in call.args) else []
    return found if found is not None or place >= len(plain) else plain[place]


def _stages(call: ast.Call, names: _Names, where: str) -> int:
    """The number of stages, said or of the topology.

    Raises:
        BadInput: it is no number that the text tells, or the topology also shares matrices.
    """
    said, topology = _argument(call, "num_stages", 1), _argument(call, "topology", 2)
    made = names.node(topology)
    if said is None and isinstance(made, ast.Call) and _called(made.func) in _TOPOLOGIES:
        said = _argument(made, "num_pp", 0)
        if _called(made.func) == "PipeModelDataParallelTopology" and names.of(_argument(made, "num_mp", 1)) != 1:
            raise BadInput("a topology with num_mp beside pipeline stages is not modelled", where=where, remedy="use num_mp 1")
    value = names.of(said)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        shown = ast.unparse(said)[:60] if said is not None else "missing"
        raise BadInput(f"num_stages ({shown}) is no number that the text tells", where=where, remedy=_remedy("STAGES"))
    return value


def _model(nodes: list[ast.AST], names: _Names) -> str | None:
    """The one model that the script loads by ``from_pretrained``; tokenizers aside."""
    found: set[Any] = set()
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"):
            continue
        if "Tokenizer" in _called(node.func.value) or "Processor" in _called(node.func.value):
            continue
        value = names.of(_argument(node, "pretrained_model_name_or_path", 0))
        found.add(value if isinstance(value, str) else None)
    return found.pop() if len(found) == 1 else None


def _config(nodes: list[ast.AST], names: _Names) -> Mapping[str, Any] | str | None:
    """What the one call of ``deepspeed.initialize`` is given as its configuration."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and _called(node.func) == "initialize"]
    for call in calls:
        for key in ("config", "config_params"):
            given = _argument(call, key, 1 << 10)
            value = names.of(given)
            if isinstance(value, Mapping | str):
                return value
            loaded = names.node(given)
            if isinstance(loaded, ast.Call) and _called(loaded.func) == "load" and loaded.args:
                opened = names.node(loaded.args[0])
                path = names.of(opened.args[0]) if isinstance(opened, ast.Call) and opened.args else None
                if isinstance(path, str):
                    return path
    value = names.arguments.get("deepspeed_config")
    return value if isinstance(value, str) else None


class _Names:
    """The literals that names stand for, and the defaults of a parser's arguments."""

    def __init__(self, nodes: list[ast.AST], flags: Mapping[str, Any], words: list[str]) -> None:
        self._flags, self._words = flags, words
        self._given: dict[str, list[ast.expr]] = {}
        self._parsed = {"args"}  # names of what a parser returns
        self.arguments: dict[str, Any] = {}
        self.taken: set[str] = set()
        self._said: set[str] = set()  # by the command line
        for node in nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assigned(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
                self._assigned(node.target, node.value if not isinstance(node, ast.AugAssign) else ast.Name("?"))
            elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
                self._given.setdefault(node.optional_vars.id, []).append(node.context_expr)
            elif isinstance(node, ast.For):
                self._assigned(node.target, ast.Name("?"))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                self._defaults(node, [call for call in calls if _called(call.func) == node.name])
        for call in calls:
            if _called(call.func) == "add_argument":
                self._add(call)
        for name, value in flags.items():
            self.arguments[name] = value
            self._said.add(name)

    def _defaults(self, function: ast.FunctionDef, calls: list[ast.Call]) -> None:
        """Keep the defaults of a function's parameters, which are unknown where a call gives others."""
        places = function.args.args
        first = len(places) - len(function.args.defaults)
        for place, default in enumerate(function.args.defaults, first):
            name = places[place].arg
            given = any(len(call.args) > place or any(one.arg in (name, None) for one in call.keywords) for call in calls)
            self._given.setdefault(name, []).append(ast.Name("?") if given else default)

    def _assigned(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Call) and _called(value.func) == "parse_known_args":
            target = target.elts[0]
        if isinstance(target, ast.Name):
            self._given.setdefault(target.id, []).append(value)
            if isinstance(value, ast.Call) and _called(value.func) in ("parse_args", "parse_known_args"):
                self._parsed.add(target.id)
        elif isinstance(target, ast.Attribute) and _called(target.value) == "args":
            self._given.setdefault(f"args.{target.attr}", []).append(value)

    def _add(self, call: ast.Call) -> None:
        """Keep the default of an argument."""
        flags = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        default = self.of(next((one.value for one in call.keywords if one.arg == "default"), None))
        long = next((flag for flag in flags if flag.startswith("--")), None)
        if long is None:
            return
        name = long[2:].replace("-", "_")
        if default is not None:
            self.arguments[name] = default
        short = next((at for at, word in enumerate(self._words[:-1]) if word in flags and word != long), None)
        if short is not None:
            value = self._words[short + 1]
            self.arguments[name] = int(value) if value.isdigit() and len(value) < 10 else value
            self._said.add(name)

    def node(self, node: ast.expr | None) -> ast.expr | None:
        """The expression that a name stands for, where it is given one alone; else the node itself."""
        for _ in range(4):
            if not isinstance(node, ast.Name) or len(given := self._given.get(node.id, [])) != 1:
                return node
            node = given[0]
        return node

    def of(self, node: ast.expr | None, depth: int = 0) -> Any:
        """The value that the text tells; None for no node, a literal None, or what it does not tell."""
        if node is None or depth > 32:
            return None
        value = self._value(node, depth)
        return None if value is _UNKNOWN else value

    def _argument(self, node: ast.Attribute) -> Any:
        """The value of an argument of the command line."""
        name = node.attr
        if f"args.{name}" in self._given or name not in self.arguments or _called(node.value) not in self._parsed:
            return _UNKNOWN
        if name not in self._said:
            self.taken.add(name)
        return self.arguments[name]

    def _value(self, node: ast.expr, depth: int) -> Any:
        if isinstance(node, ast.Constant):
            plain = node.value is None or isinstance(node.value, bool | int | float | str)
            return node.value if plain and len(str(node.value)[:1000]) < 1000 else _UNKNOWN
        if isinstance(node, ast.Name):
            given = self._given.get(node.id, [])
            return self._value(given[0], depth + 1) if len(given) == 1 and depth < 32 else _UNKNOWN
        if isinstance(node, ast.Attribute):
            return self._argument(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, depth + 1)
            return -value if isinstance(value, int | float) else _UNKNOWN
        if isinstance(node, ast.Dict):
            keys = [self._value(key, depth + 1) if key is not None else _UNKNOWN for key in node.keys]
            values = [self._value(value, depth + 1) for value in node.values]
            known = all(isinstance(key, str) for key in keys) and all(value is not _UNKNOWN for value in values)
            return dict(zip(keys, values, strict=True)) if known else _UNKNOWN
        if isinstance(node, ast.List | ast.Tuple):
            values = [self._value(one, depth + 1) for one in node.elts]
            return _UNKNOWN if any(value is _UNKNOWN for value in values) else values
        return _UNKNOWN
