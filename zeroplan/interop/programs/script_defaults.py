"""Defaults that a script's own dataclasses give to ``HfArgumentParser``: they count where the command line gives no flag.

Source: transformers 5.17, ``hf_argparser.py`` (``_add_dataclass_arguments``): a field's default is its argument's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.interop.programs.known import arguments_of, keys_of_scripts
from zeroplan.interop.programs.script_reader import HARMLESS, Reader, parsed
from zeroplan.interop.programs.script_syntax import called, holds_unknown
from zeroplan.interop.programs.script_values import Values

_PARSERS = ("HfArgumentParser", "TrlParser")
#: Packages whose classes have the defaults that the readers of their programs know.
_LIBRARIES = ("transformers", "trl", "peft", "accelerate", "datasets")
#: Calls that switch checkpointing on: a method of transformers, and peft's functions by default.
_CHECKPOINTS = ("gradient_checkpointing_enable", "prepare_model_for_kbit_training", "prepare_model_for_int8_training")
#: Arguments of peft's ``LoraConfig`` by which more is trained than the adapters.
_BESIDE_FLAGS = ("modules_to_save", "use_dora", "trainable_token_indices")
_SWITCHES = ("use_lora", "use_peft", "lora_enable")
_RANKS = ("lora_r", "lora_rank", "lora_dim")
#: What goes with adapters, beside names that begin with ``lora_``.
_WITH_ADAPTERS = ("bits", "quantization_bit", "q_lora", "use_qlora", "load_in_4bit", "load_in_8bit", "target_modules")


@dataclass(frozen=True, slots=True)
class ScriptDefaults:
    """What a script's dataclasses give where no flag does.

    Attributes:
        data: literal defaults by name.
        unresolved: by name, defaults that the text does not tell.
        left_out: what changes arguments after they are parsed, and classes of other files.
        name: of the script.
        checkpoints: the first call that switches checkpointing on, which a flag may do already.
        adapters: what the script gives adapters beside its arguments.
    """

    data: Mapping[str, Any]
    unresolved: Mapping[str, Unmodelled]
    left_out: tuple[Unmodelled, ...]
    name: str
    checkpoints: tuple[Unmodelled, ...] = ()
    adapters: tuple[Unmodelled, ...] = ()

    def beneath(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults that count beneath what is given; those of adapters where a rank is given or a known switch is on."""
        adapts = any(key in given for key in _RANKS) or bool(self._switch(given))
        return {key: value for key, value in self.data.items() if key not in given and (adapts or not _of_adapters(key))}

    def _switch(self, given: Mapping[str, Any]) -> Any:
        """The value of the first switch for adapters that is given or has a default; None where there is none."""
        merged = {**self.data, **given}
        return next((merged[key] for key in _SWITCHES if key in merged), None)

    def unsure(self, given: Mapping[str, Any]) -> tuple[Unmodelled, ...]:
        """What the text does not tell of a run to which this is given."""
        found = [one for key, one in self.unresolved.items() if key not in given]
        unused = self.data.keys() - self.beneath(given).keys() - given.keys()
        if self._switch(given) is None and any(_of_adapters(key) for key in unused):
            says = f"{self.name} has defaults of adapters and no switch that is known; all weights count as trained"
            found.append(Unmodelled("lora", Effect.LESS, says[:120]))
        return (*found, *self.left_out)


def _of_adapters(key: str) -> bool:
    return key in _WITH_ADAPTERS or (key.startswith("lora_") and key not in _SWITCHES)


def script_defaults(text: str, name: str) -> ScriptDefaults:
    """Read the defaults of the dataclasses that a script hands to its parser. Raises BadInput: it is no Python."""
    reader = _Defaults(Values(parsed(text, name), {}), name)
    reader.collect()
    checkpoints, adapters = [], []
    for call in reader.calls:
        function = called(call.func)
        if function in _CHECKPOINTS:
            says = f"line {call.lineno}: it checkpoints blocks; whether it is reached is not told"
            checkpoints.append(Unmodelled(function, Effect.UNKNOWN, says))
        elif function == "LoraConfig":
            given = {one.arg: reader.values.of(one.value) for one in call.keywords if one.arg in _BESIDE_FLAGS}
            adapters += [
                Unmodelled(str(key), Effect.MORE, f"line {call.lineno}: the script gives it to adapters")
                for key, value in given.items()
                if value not in (None, False)
            ]
    left_out = tuple(reader.left_out)
    return ScriptDefaults(
        reader.data, reader.unresolved, left_out, name.rpartition("/")[2], tuple(checkpoints[:1]), tuple(adapters)
    )


def parses_arguments(text: str) -> bool:
    """Whether a script hands dataclasses to a parser of transformers or TRL."""
    return any(word in text for word in (*_PARSERS, "parse_args_into_dataclasses"))


def imported(text: str, name: str) -> list[str]:
    """List the modules that a script imports, those relative to it by their own names. Raises BadInput: it is no Python."""
    nodes = list(ast.walk(parsed(text, name)))
    found = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{one.name}" if node.module else one.name for one in node.names]
            found += [*([node.module] if node.module else []), *inside]
    return found


class _Defaults(Reader):
    def __init__(self, values: Values, name: str) -> None:
        super().__init__(values, name)
        self.unresolved: dict[str, Unmodelled] = {}
        self._keys = arguments_of("hf-trainer", "trl") | keys_of_scripts()
        imports = [node for node in values.nodes if isinstance(node, ast.ImportFrom)]
        self._strange = {
            one.asname or one.name
            for node in imports
            for one in node.names
            if node.level or (node.module or "").partition(".")[0] not in _LIBRARIES
        }

    def collect(self) -> None:
        """Take the fields of every class that a parser gets, and list what changes them."""
        for call in self.calls:
            if self.values.name_of(call.func) in _PARSERS:
                for node in self._handed(call):
                    self._class(node, call)
        self._assigned()

    def _handed(self, call: ast.Call) -> list[ast.expr]:
        given = call.args[0] if call.args else next((one.value for one in call.keywords if one.arg == "dataclass_types"), None)
        node = self.values.node(given)
        return list(node.elts) if isinstance(node, ast.Tuple | ast.List) else [] if node is None else [node]

    def _class(self, node: ast.expr, at: ast.AST, depth: int = 0) -> None:
        cls = self.classes.get(node.id) if isinstance(node, ast.Name) else None
        if cls is None or depth > 8:
            if isinstance(node, ast.Name) and node.id in self._strange:
                self.leave_out(node.id, at, Effect.UNKNOWN, f"the defaults of {node.id[:40]} stand in another file")
            elif not isinstance(node, ast.Name | ast.Attribute):
                self.leave_out("arguments", at, Effect.UNKNOWN, f"{ast.unparse(node)[:50]} is not told")
            return
        for base in reversed(cls.bases):
            self._class(base, cls, depth + 1)
        for one in cls.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
                self._field(one.target.id, one.value)
            elif isinstance(one, ast.FunctionDef) and one.name == "__post_init__":
                for key in self._moving(_fields_set(one, "self")):
                    self.leave_out(key, one, Effect.UNKNOWN, f"{cls.name[:40]}.__post_init__ may change it")

    def _field(self, key: str, node: ast.expr) -> None:
        if key not in self._keys:
            return
        value: ast.expr | None = node
        if isinstance(node, ast.Call) and called(node.func) == "field":
            words = {one.arg: one.value for one in node.keywords}
            if not words.keys() & {"default", "default_factory"}:
                return  # the command line must give it
            factory = words.get("default_factory")
            value = words.get("default") if factory is None else factory.body if isinstance(factory, ast.Lambda) else None
        told = value.value if isinstance(value, ast.Constant) else self.values.of(value)
        self.data.pop(key, None)
        self.unresolved.pop(key, None)
        if holds_unknown(told):
            if not HARMLESS.match(key):
                says = f"line {node.lineno}: the default {ast.unparse(value or node)[:50]} is not told"
                self.unresolved[key] = Unmodelled(key, Effect.UNKNOWN, says[:120])
        elif told is not None:
            self.data[key] = told

    def _assigned(self) -> None:
        """List arguments that are assigned on what a parser returned."""
        names = {
            one.id
            for node in self.values.nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and called(node.value.func).startswith("parse_")
            for target in node.targets
            for one in ast.walk(target)
            if isinstance(one, ast.Name)
        }
        for node in self.values.nodes:
            for name in names if isinstance(node, ast.Assign | ast.AugAssign) else ():
                for key in self._moving(_fields_set(node, name)):
                    self.leave_out(key, node, Effect.UNKNOWN, f"{name[:40]}.{key} is assigned after it was parsed")

    def _moving(self, keys: Iterator[str]) -> list[str]:
        return [key for key in keys if key in self._keys and not HARMLESS.match(key)]


def _fields_set(node: ast.AST, owner: str) -> Iterator[str]:
    """Yield the fields of an object that a piece of code assigns."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and called(one.value) == owner:
            yield one.attr
