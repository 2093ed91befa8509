"""What the text of a Python script tells of the values in it. Nothing is run or imported.

Known are literals, arithmetic on them, names that are bound once in the whole file, fields of a class or a dataclass of the
file, a parser's arguments, and defaults of a function that no call gives others. Whatever may change elsewhere (another
binding, an assigned field, a method that changes a dict, the environment) is unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zeroplan.interop.programs.script_arithmetic import computed
from zeroplan.interop.programs.script_parser import ParserArguments
from zeroplan.interop.programs.script_syntax import UNKNOWN, base_name, called

_CONVERSIONS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "bool": bool, "len": len}
_FOLDS: dict[str, Callable[..., Any]] = {"max": max, "min": min, "sum": sum, "round": round, "list": list, "tuple": list}
#: Enumerations of transformers, whose members stand for their names in lower case.
_ENUMS = ("IntervalStrategy", "OptimizerNames", "SaveStrategy")
#: Methods that change what they are called on.
_CHANGING = frozenset(
    ("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove", "sort", "merge_with", "set")
)
#: Calls that rebind names in ways that no text tells.
_OPAQUE = ("exec", "globals")
#: Calls that leave a dict or a list as it is.
_READING = frozenset(
    (
        *("print", "pprint", "len", "dict", "list", "str", "dumps", "dump", "init", "from_pretrained", "isinstance", "sorted"),
        *("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "LoraConfig", "BitsAndBytesConfig"),
        *("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy", "Trainer", "Seq2SeqTrainer", "SFTTrainer"),
        *("DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer"),
    )
)
#: Modules whose star imports bind none of a script's own names.
_LIBRARIES = ("transformers", "torch", "peft", "trl", "datasets", "typing", "accelerate", "lightning", "pytorch_lightning")
_MOST_TEXT = 10_000
_MOST_DEPTH = 24


def _is_main(test: ast.expr) -> bool:
    """Whether a condition is ``__name__ == "__main__"``."""
    return isinstance(test, ast.Compare) and any(called(one) == "__name__" for one in (test.left, *test.comparators))


class Values:
    """The values that a script's text tells.

    Args:
        tree: the parsed text.
        flags: the command line's arguments by name, where a command starts the script.
        words: its further words, short options among them.
        environment: variables that the command line sets.

    Attributes:
        taken: the arguments whose defaults were taken.
        opaque: the line of a call by which no name is sure; 0 without one.
    """

    def __init__(
        self,
        tree: ast.Module,
        flags: Mapping[str, Any] | None = None,
        words: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes = list(ast.walk(tree))
        self.parents = {id(inner): node for node in self.nodes for inner in ast.iter_child_nodes(node)}
        self._words = list(words)
        self._aliases: dict[str, str] = {}
        self.taken: set[str] = set()
        self.opaque = 0
        self._flags, self._environment = flags or {}, environment or {}
        self._bound: dict[str, list[ast.expr | None]] = {}
        self._changed: set[str] = set()
        self._fired: set[str] = set()  # parameters that fire gives from the command line
        self._parser = ParserArguments(self.of)
        self._parsed: set[str] = set()
        self._classes: dict[str, ast.ClassDef] = {}
        self._known: dict[int, Any] = {}
        self._functions: set[str] = set()
        self._calls: dict[str, list[ast.Call]] = {}
        self._loads: dict[str, list[ast.Name]] = {}
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef):
                self._functions.add(node.name)
            elif isinstance(node, ast.Call):
                self._calls.setdefault(called(node.func), []).append(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._loads.setdefault(node.id, []).append(node)
        self._collect()
        self._known.clear()  # what was read before all changes were known

    def of(self, node: ast.expr | None, depth: int = 0) -> Any:
        """The value of an expression, :data:`UNKNOWN` where the text does not tell it."""
        if node is None or depth > _MOST_DEPTH or self.opaque:
            return UNKNOWN
        if id(node) in self._known:
            return self._known[id(node)]
        self._known[id(node)] = UNKNOWN  # while it is computed: a name may stand for itself
        try:
            value = self._value(node, depth + 1)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError, KeyError, IndexError, AttributeError):
            return UNKNOWN
        if isinstance(value, str | list | dict) and len(value) > _MOST_TEXT:
            return UNKNOWN
        self._known[id(node)] = value
        return value

    def node(self, node: ast.expr | None) -> ast.expr | None:
        """The expression that a name stands for, where it is bound once; else the node itself."""
        for _ in range(4):
            if not isinstance(node, ast.Name) or len(found := self._bound.get(node.id, [])) != 1 or found[0] is None:
                return node
            node = found[0]
        return node

    def name_of(self, node: ast.expr | None) -> str:
        """The last name of what is called, by the name under which its module has it."""
        found = called(node)
        return self._aliases.get(found, found) if isinstance(node, ast.Name) else found

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield what holds a node, each with the part of it that the node is in."""
        while (parent := self.parents.get(id(node))) is not None:
            yield parent, node
            node = parent

    def reached(self, node: ast.AST) -> bool | None:
        """Whether the conditions around a node let it run; None where the text does not tell one of them."""
        sure: bool | None = True
        for parent, child in self.ancestors(node):
            if not isinstance(parent, ast.If | ast.IfExp) or child is parent.test:
                continue
            test = self.of(parent.test)
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            if test is UNKNOWN and not _is_main(parent.test):
                sure = None
            elif test is not UNKNOWN and bool(test) is not any(child is one for one in body):
                return False
        return sure

    def in_loop(self, node: ast.AST) -> bool:
        """Whether a node stands in a loop."""
        loops = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.GeneratorExp)
        return any(isinstance(parent, loops) for parent, _ in self.ancestors(node))

    def changed(self, name: str) -> bool:
        """Whether a field or an item of what a name stands for is assigned somewhere."""
        return name in self._changed

    def keywords(self, call: ast.Call) -> Iterator[tuple[str, Any, ast.expr]]:
        """Yield a call's keyword arguments with their values, those of ``**mapping`` too; an unknown mapping is ``**``."""
        for one in call.keywords:
            value = self.of(one.value)
            if one.arg is not None:
                yield one.arg, value, one.value
            elif isinstance(value, dict):
                for key, item in value.items():
                    yield str(key), item, one.value
            else:
                yield "**", UNKNOWN, one.value

    # What is bound

    def _collect(self) -> None:
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assigned(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                if node.value is not None:
                    self._assigned(node.target, node.value)
            elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor | ast.comprehension):
                self._assigned(node.target, None)
            elif isinstance(node, ast.Delete):
                for target in node.targets:
                    self._assigned(target, None)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._assigned(node.optional_vars, None)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                self._bind(node.name, None)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._imported(node)
            elif isinstance(node, ast.ClassDef):
                self._classes[node.name] = node
                self._bind(node.name, None)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._bind(node.name, None)
                self._parameters(node)
            elif isinstance(node, ast.Lambda):
                for one in (*node.args.args, *node.args.kwonlyargs):
                    self._bind(one.arg, None)
            elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
                self._bind(node.name, None)
            elif isinstance(node, ast.MatchMapping) and node.rest:
                self._bind(node.rest, None)
            elif isinstance(node, ast.Call):
                self._called(node)
        self._parser.read(self.nodes)
        fired = {name: value for name, value in self._flags.items() if name in self._fired}
        self._bound |= {name: [ast.Constant(value)] for name, value in fired.items()}
        self._flags = fired | self._parser.given(self._flags, self._words)
        for name, loads in self._loads.items():
            for node in loads if self._holds_items(name) else ():
                self._handed(node)

    def _holds_items(self, name: str) -> bool:
        found = self._bound.get(name, [])
        return len(found) == 1 and isinstance(found[0], ast.Dict | ast.List | ast.Call)

    def _handed(self, node: ast.Name) -> None:
        """Count a dict or list as changed where it, or a part of it, gets another name or goes to code that may change it."""
        parent, child = next(
            ((one, inner) for one, inner in self.ancestors(node) if not self._is_item(one, inner)), (None, node)
        )
        if isinstance(parent, ast.keyword):
            holder = self.parents.get(id(parent))
            safe = parent.arg is None or (isinstance(holder, ast.Call) and self.name_of(holder.func) in _READING)
        elif isinstance(parent, ast.Call):
            safe = self.name_of(parent.func) in _READING
        elif isinstance(parent, ast.Attribute):
            holder = self.parents.get(id(parent))
            method = isinstance(holder, ast.Call) and holder.func is parent
            safe = parent.attr != "__dict__" and (not method or parent.attr in ("get", "copy", "keys"))
        else:
            safe = isinstance(parent, ast.Dict | ast.Compare | ast.FormattedValue | ast.BinOp)
        if not safe and (child is node or (isinstance(child, ast.expr) and isinstance(self.of(child), dict | list))):
            self._changed.add(node.id)

    def _is_item(self, parent: ast.AST, child: ast.AST) -> bool:
        return isinstance(parent, ast.Subscript) and parent.value is child

    def _bind(self, name: str, value: ast.expr | None) -> None:
        self._bound.setdefault(name, []).append(value)

    def _assigned(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            items = value.elts if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts) else None
            for at, one in enumerate(target.elts):
                inner = one.value if isinstance(one, ast.Starred) else one
                self._assigned(inner, items[at] if items is not None else None)
            if isinstance(value, ast.Call) and called(value.func) == "parse_known_args":
                self._parsed.add(called(target.elts[0]))
        elif isinstance(target, ast.Name):
            self._bind(target.id, value)
            if isinstance(value, ast.Call) and called(value.func) == "parse_args":
                self._parsed.add(target.id)
        elif name := base_name(target):
            self._changed.add(name)

    def _imported(self, node: ast.Import | ast.ImportFrom) -> None:
        for one in node.names:
            if one.name == "*":
                module = (getattr(node, "module", None) or "").partition(".")[0]
                if module not in _LIBRARIES:
                    self.opaque = self.opaque or node.lineno
            else:
                self._bind((one.asname or one.name).partition(".")[0], None)
                if one.asname and isinstance(node, ast.ImportFrom):
                    self._aliases[one.asname] = one.name

    def _parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Bind parameters: to their defaults where no call in the file gives others and the function is not handed around."""
        given = function.args
        plain = [*given.posonlyargs, *given.args]
        defaults: dict[str, ast.expr] = {
            one.arg: default for one, default in zip(plain[len(plain) - len(given.defaults) :], given.defaults, strict=True)
        }
        defaults |= {
            one.arg: value for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value is not None
        }
        calls, handed = self._uses(function.name)
        for at, one in enumerate((*plain, *given.kwonlyargs)):
            by_call = any(
                len(call.args) > at or any(word.arg in (one.arg, None) for word in call.keywords) for call in calls
            ) or any(isinstance(inner, ast.Starred) for call in calls for inner in call.args)
            known = one.arg in defaults and not by_call and not handed and not function.decorator_list
            self._bind(one.arg, defaults[one.arg] if known else None)
            if known and self._is_fired(function.name):
                self._fired.add(one.arg)
        for rest in (given.vararg, given.kwarg):
            if rest is not None:
                self._bind(rest.arg, None)

    def _uses(self, name: str) -> tuple[list[ast.Call], bool]:
        """The calls of a function, and whether it is handed to another one; fire's call of it is neither."""
        calls = self._calls.get(name, [])
        known = {id(call.func) for call in calls} | {id(one) for call in self._calls.get("Fire", []) for one in call.args}
        return calls, any(id(node) not in known for node in self._loads.get(name, []))

    def _is_fired(self, name: str) -> bool:
        return any(called(one) == name for call in self._calls.get("Fire", []) for one in call.args)

    def _called(self, call: ast.Call) -> None:
        name = called(call.func)
        if isinstance(call.func, ast.Name) and name in _OPAQUE:
            self.opaque = self.opaque or call.lineno
        if name == "setattr" and call.args and (changed := base_name(call.args[0])):
            self._changed.add(changed)
        if isinstance(call.func, ast.Attribute) and name in _CHANGING and (changed := base_name(call.func)):
            self._changed.add(changed)
        # A function of the file may change a dict or an object that it is given.
        if isinstance(call.func, ast.Name) and name in self._functions:
            for one in (*call.args, *(word.value for word in call.keywords)):
                if isinstance(one, ast.Name):
                    self._changed.add(one.id)

    # Expressions

    def _value(self, node: ast.expr, depth: int) -> Any:
        if isinstance(node, ast.Constant):
            return node.value if node.value is None or isinstance(node.value, bool | int | float | str) else UNKNOWN
        if isinstance(node, ast.Name):
            return self._named(node.id, depth)
        if isinstance(node, ast.Attribute):
            return self._field(node, depth)
        if isinstance(node, ast.Dict):
            return self._dict(node, depth)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            items = [self.of(one, depth) for one in node.elts]
            return UNKNOWN if any(one is UNKNOWN for one in items) else items
        if isinstance(node, ast.Subscript):
            return self._item(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.JoinedStr):
            parts = [self.of(one.value if isinstance(one, ast.FormattedValue) else one, depth) for one in node.values]
            plain = all(not isinstance(one, ast.FormattedValue) or one.format_spec is None for one in node.values)
            return "".join(map(str, parts)) if plain and all(one is not UNKNOWN for one in parts) else UNKNOWN
        return computed(node, lambda one: self.of(one, depth))

    def _named(self, name: str, depth: int) -> Any:
        found = self._bound.get(name, [])
        if not found or any(one is None for one in found):
            return UNKNOWN
        values = [self.of(one, depth) for one in found]
        if len(values) > 1 and not all(isinstance(one, ast.Constant) and one.value == values[0] for one in found):
            return UNKNOWN
        if isinstance(values[0], dict | list) and name in self._changed:
            return UNKNOWN
        if name in self._fired and name not in self._flags:
            self.taken.add(name)
        return values[0]

    def _field(self, node: ast.Attribute, depth: int) -> Any:
        owner = base_name(node)
        if owner == "torch" and isinstance(node.value, ast.Name):
            return node.attr
        if isinstance(node.value, ast.Name | ast.Attribute) and called(node.value) in _ENUMS:
            return node.attr.lower()
        if not isinstance(node.value, ast.Name) or owner in self._changed:
            return UNKNOWN
        if owner in self._parsed and len(self._bound.get(owner, [])) == 1:
            value = self._parser.arguments.get(node.attr, UNKNOWN)
            if node.attr not in self._flags:
                self.taken.add(node.attr)
            return value
        made = self.node(node.value)
        if isinstance(made, ast.Call) and called(made.func) == "SimpleNamespace":
            return {key: value for key, value, _ in self.keywords(made)}.get(node.attr, UNKNOWN)
        kind = called(made.func) if isinstance(made, ast.Call) else owner
        cls = self._classes.get(kind)
        if cls is None or len(self._bound.get(kind, [])) != 1 or kind in self._changed:
            return UNKNOWN
        if isinstance(made, ast.Call):
            if made.args or any(isinstance(one, ast.FunctionDef) and one.name == "__init__" for one in cls.body):
                return UNKNOWN
            words = {key: value for key, value, _ in self.keywords(made)}
            if "**" in words or node.attr in words:
                return words.get(node.attr, UNKNOWN)
        return self._class_field(cls, node.attr, depth)

    def _class_field(self, cls: ast.ClassDef, name: str, depth: int) -> Any:
        """The default of a class's or a dataclass's field; ``__post_init__`` may change any."""
        if any(isinstance(one, ast.FunctionDef) and one.name == "__post_init__" for one in cls.body):
            return UNKNOWN
        for one in cls.body:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
            if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
                continue
            value = getattr(one, "value", None)
            if isinstance(value, ast.Call) and called(value.func) == "field":
                words = {word.arg: word.value for word in value.keywords}
                factory = words.get("default_factory")
                if isinstance(factory, ast.Lambda):
                    return self.of(factory.body, depth)
                return self.of(words.get("default"), depth) if factory is None else UNKNOWN
            return self.of(value, depth)
        return UNKNOWN

    def _dict(self, node: ast.Dict, depth: int) -> Any:
        found: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.of(item, depth)
            if key is None:
                if not isinstance(value, dict):
                    return UNKNOWN
                found |= value
                continue
            name = self.of(key, depth)
            if name is UNKNOWN or isinstance(name, list | dict):
                return UNKNOWN
            found[name] = value
        return found

    def _item(self, node: ast.Subscript, depth: int) -> Any:
        if isinstance(node.value, ast.Attribute) and called(node.value) == "environ":
            key = self.of(node.slice, depth)
            return self._environment.get(key, UNKNOWN) if isinstance(key, str) else UNKNOWN
        owner, key = self.of(node.value, depth), self.of(node.slice, depth)
        return owner[key] if isinstance(owner, dict | list) and key is not UNKNOWN else UNKNOWN

    def _call(self, node: ast.Call, depth: int) -> Any:
        name = called(node.func)
        arguments = [self.of(one, depth) for one in node.args]
        if name in ("is_bf16_supported", "is_available") and base_name(node.func) == "torch":
            return True  # plans are of runs on GPUs
        if name in ("getenv", "get") and base_name(node.func) == "os":
            key = arguments[0] if arguments else UNKNOWN
            return self._environment.get(key, UNKNOWN) if isinstance(key, str) else UNKNOWN
        if name == "get" and isinstance(node.func, ast.Attribute) and arguments and arguments[0] is not UNKNOWN:
            owner = self.of(node.func.value, depth)
            default = arguments[1] if len(arguments) > 1 else None
            return owner.get(arguments[0], default) if isinstance(owner, dict) else UNKNOWN
        if not isinstance(node.func, ast.Name) or name in self._bound:
            return UNKNOWN
        if name == "dict" and not node.args:
            words = {key: value for key, value, _ in self.keywords(node)}
            return UNKNOWN if "**" in words else words
        done = _CONVERSIONS.get(name) or _FOLDS.get(name)
        if done is None or node.keywords or not arguments or any(one is UNKNOWN for one in arguments):
            return UNKNOWN
        return done(*arguments)
