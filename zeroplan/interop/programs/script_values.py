"""What the text of a Python script tells of the values in it. Nothing is run or imported.

Known are literals, arithmetic on them, names that are bound once in the whole file, fields of a class or a dataclass of the
file, a parser's arguments, and parameters of a function: what its one call gives them, else their defaults. Whatever may change
elsewhere (another binding, an assigned field, a method that changes a dict, the environment) is unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zeroplan.interop.programs.script_arithmetic import computed
from zeroplan.interop.programs.script_functions import Functions
from zeroplan.interop.programs.script_parser import ParserArguments
from zeroplan.interop.programs.script_syntax import CHANGING, OPAQUE, READING, UNKNOWN, base_name, called

_CONVERSIONS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "bool": bool, "len": len}
_FOLDS: dict[str, Callable[..., Any]] = {"max": max, "min": min, "sum": sum, "round": round, "list": list, "tuple": list}
#: Enumerations of transformers, whose members stand for their names in lower case.
_ENUMS = ("IntervalStrategy", "OptimizerNames", "SaveStrategy")
#: Modules whose star imports bind none of a script's own names.
_LIBRARIES = ("transformers", "torch", "peft", "trl", "datasets", "typing", "accelerate", "lightning", "pytorch_lightning")
_MOST_TEXT = 10_000
_MOST_DEPTH = 24


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


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
        self._command = dict(self._flags)
        self._bound: dict[str, list[ast.expr | None]] = {}
        self._changed: set[str] = set()
        self._fields: dict[str, set[str]] = {}  # fields, and keys of dicts, that are assigned
        self._fired: set[str] = set()  # parameters that fire gives from the command line
        self._parser = ParserArguments(self.of)
        self._parsed: set[str] = set()
        self._classes: dict[str, ast.ClassDef] = {}
        self._known: dict[int, Any] = {}
        self._passed: list[tuple[str, str]] = []  # names that functions of the file get, and the parameters for them
        calls: dict[str, list[ast.Call]] = {}
        self._loads: dict[str, list[ast.Name]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Call):
                calls.setdefault(called(node.func), []).append(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._loads.setdefault(node.id, []).append(node)
        self._functions = Functions(self.nodes, self.parents, calls, self._loads)
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

    def _names(self, node: ast.expr) -> list[str]:
        """The name that stands there, and those that it stands for, where each is bound once."""
        found: list[str] = []
        while isinstance(node, ast.Name) and node.id not in found:
            found.append(node.id)
            bound = self._bound.get(node.id, [])
            if len(bound) != 1 or not isinstance(bound[0], ast.Name):
                break
            node = bound[0]
        return found

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

    def flag(self, name: str) -> Any:
        """The value of a flag of the command line, else the default of the parser's argument; None without either."""
        value = self._command.get(name, self._parser.arguments.get(name))
        return None if value is UNKNOWN else value

    def changed(self, name: str) -> bool:
        """Whether a field or an item of what a name stands for is assigned somewhere."""
        return name in self._changed or bool(self._fields.get(name))

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
            self._collect_targets(node)
            self._collect_names(node)
        self._parser.read(self.nodes)
        self._settle()

    def _collect_targets(self, node: ast.AST) -> None:
        """Note what a statement binds that gives names values, or takes them."""
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

    def _collect_names(self, node: ast.AST) -> None:
        """Note what binds a name to what no expression tells, and calls."""
        if isinstance(node, ast.ExceptHandler) and node.name:
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

    def _settle(self) -> None:
        """Follow names through flags, functions and other names, until nothing changes."""
        fired = {name: value for name, value in self._flags.items() if name in self._fired}
        self._bound |= {name: [ast.Constant(value)] for name, value in fired.items()}
        self._flags = fired | self._parser.parsed(self._flags, self._words)
        for name, found in list(self._bound.items()):  # what a function returns has two names
            for other in self._functions.returned(found):
                self._alias(name, other)
        inside = {parameter for _, parameter in self._passed}
        for name, loads in self._loads.items():
            for node in loads if name in inside or self._holds_items(name) else ():
                self._handed(node)
        for _ in self._passed:  # what changes of a name changes of its other names, and so on
            before = len(self._changed), sum(map(len, self._fields.values()))
            for name, other in self._passed:
                self._changed |= {name} if other in self._changed else set()
                self._fields.setdefault(name, set()).update(self._fields.get(other, ()))
            if before == (len(self._changed), sum(map(len, self._fields.values()))):
                break
        self._parsed = {name for name in self._parsed if len(self._bound[name]) == 1}
        self._parsed |= {name for name, found in self._bound.items() if found and all(map(self._parses, found))}

    def _holds_items(self, name: str) -> bool:
        found = self._bound.get(name, [])
        return bool(found) and all(isinstance(one, ast.Dict | ast.List | ast.Call) for one in found)

    def _handed(self, node: ast.Name) -> None:
        """Count a dict or list as changed where it, or a part of it, gets another name or goes to code that may change it."""
        around = self.ancestors(node)  # items are parts of it
        others = ((one, inner) for one, inner in around if not (isinstance(one, ast.Subscript) and one.value is inner))
        parent, child = next(others, (None, node))
        if isinstance(parent, ast.keyword):
            holder = self.parents.get(id(parent))
            reads = isinstance(holder, ast.Call) and self.name_of(holder.func) in READING
            safe = (
                parent.arg is None
                or reads
                or (isinstance(holder, ast.Call) and self._functions.parameter_of(holder, child) is not None)
            )
        elif isinstance(parent, ast.Call):
            safe = self.name_of(parent.func) in READING or self._stays(parent, child, node)
            if self.name_of(parent.func) == "vars":
                self._handed_as_dict(node, parent)
                return
        elif isinstance(parent, ast.Attribute):
            holder = self.parents.get(id(parent))
            method = isinstance(holder, ast.Call) and holder.func is parent
            safe = parent.attr != "__dict__" and (not method or parent.attr in ("get", "copy", "keys"))
        elif isinstance(parent, ast.Return):
            known = ("parse_args", *self._functions.named)  # what a function of the file returns has both names (_settle)
            safe = all(isinstance(one, ast.Call) and called(one.func) in known for one in self._bound.get(node.id, [None]))
        else:
            safe = isinstance(parent, ast.Dict | ast.Compare | ast.FormattedValue | ast.BinOp)
        if not safe and (child is node or (isinstance(child, ast.expr) and isinstance(self.of(child), dict | list))):
            self._changed.add(node.id)

    def _stays(self, call: ast.Call, part: ast.AST, node: ast.Name) -> bool:
        """Whether a name as a whole goes to a function of the file, which is followed."""
        return part is node and self._functions.parameter_of(call, part) is not None

    def _alias(self, name: str, other: str) -> None:
        """Note two names of one object: what changes of either changes of both."""
        self._passed += [(name, other), (other, name)]

    def _handed_as_dict(self, node: ast.Name, view: ast.Call) -> None:
        """Count what a name of ``vars(name)`` changes as changed; a call that gets it reads it."""
        parent = self.parents.get(id(view))
        if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
            self._alias(node.id, parent.targets[0].id)
            return
        call = self.parents.get(id(parent)) if isinstance(parent, ast.keyword) else parent
        own = isinstance(call, ast.Call) and called(call.func) in self._functions.named
        if own or not isinstance(call, ast.Call | ast.FormattedValue):
            self._changed.add(node.id)

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
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            self._fields.setdefault(target.value.id, set()).add(target.attr)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and _is_text(target.slice):
            self._fields.setdefault(target.value.id, set()).add(ast.literal_eval(target.slice))
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
        for name, value, fired in self._functions.parameters(function):
            self._bind(name, value)
            if fired:
                self._fired.add(name)

    def _parses(self, value: ast.expr | None, depth: int = 0) -> bool:
        """Whether an expression is what a parser parses, also where a function of the file returns it."""
        if not isinstance(value, ast.Call) or depth > 4:
            return False
        if isinstance(value.func, ast.Attribute):
            return value.func.attr == "parse_args"
        own = self._functions.named.get(called(value.func), [])
        returns = [node.value for one in own for node in ast.walk(one) if isinstance(node, ast.Return)]
        if any(isinstance(one, ast.Name) and one.id in self._changed for one in returns):
            return False
        named = [self._bound.get(one.id, [None]) if isinstance(one, ast.Name) else [one] for one in returns]
        inside = [[one for one in found if one is not value] for found in named]
        return (
            len(own) == 1
            and bool(inside)
            and all(bool(found) and all(self._parses(one, depth + 1) for one in found) for found in inside)
        )

    def _called(self, call: ast.Call) -> None:
        name = called(call.func)
        if isinstance(call.func, ast.Name) and name in OPAQUE:
            self.opaque = self.opaque or call.lineno
        if name == "setattr" and call.args and (changed := base_name(call.args[0])):
            self._changed.add(changed)
        if isinstance(call.func, ast.Attribute) and name in CHANGING and (changed := base_name(call.func)):
            self._changed.add(changed)
        # A function of the file may change a dict or an object that it is given.
        if isinstance(call.func, ast.Name) and name in self._functions.named:
            for one in (*call.args, *(word.value for word in call.keywords)):
                parameter = self._functions.parameter_of(call, one)
                if isinstance(one, ast.Name) and parameter is None:
                    self._changed.add(one.id)
                elif isinstance(one, ast.Name) and parameter is not None:
                    self._alias(one.id, parameter)

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
        plain = all(isinstance(one, bool | int | float | str | None) and type(one) is type(values[0]) for one in values)
        if len(values) > 1 and not (plain and all(one == values[0] for one in values)):
            return UNKNOWN
        if isinstance(values[0], dict | list) and name in self._changed:
            return UNKNOWN
        if isinstance(values[0], dict) and name in self._fields:
            return values[0] | dict.fromkeys(self._fields[name], UNKNOWN)
        if name in self._fired and name not in self._flags:
            self.taken.add(name)
        return values[0]

    def _field(self, node: ast.Attribute, depth: int) -> Any:
        owner = base_name(node)
        if owner == "torch" and isinstance(node.value, ast.Name):
            return node.attr
        if isinstance(node.value, ast.Name | ast.Attribute) and called(node.value) in _ENUMS:
            return node.attr.lower()
        names = self._names(node.value)
        if not names or any(one in self._changed or node.attr in self._fields.get(one, ()) for one in names):
            return UNKNOWN
        owner = names[-1]
        if owner in self._parsed:
            value = self._parser.arguments.get(node.attr, UNKNOWN)
            if node.attr not in self._flags:
                self.taken.add(node.attr)
            return value
        made = self.node(node.value)
        if isinstance(made, ast.Call) and called(made.func) == "SimpleNamespace":
            return {key: value for key, value, _ in self.keywords(made)}.get(node.attr, UNKNOWN)
        kind = called(made.func) if isinstance(made, ast.Call) else owner
        cls = self._classes.get(kind)
        if cls is None or len(self._bound.get(kind, [])) != 1 or self.changed(kind):
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
