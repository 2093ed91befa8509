"""Functions of a Python script: who calls them, and by which parameter each gets what a call gives it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from zeroplan.interop.programs.script_syntax import called


class Functions:
    """The functions of a script by their names.

    Args:
        nodes: of the script's tree.
        parents: the node around each, by its id.
        calls: by the last name of what is called.
        loads: where each name is read.
    """

    def __init__(
        self,
        nodes: Sequence[ast.AST],
        parents: Mapping[int, ast.AST],
        calls: Mapping[str, Sequence[ast.Call]],
        loads: Mapping[str, Sequence[ast.Name]],
    ) -> None:
        self._parents, self._calls, self._loads = parents, calls, loads
        self.named: dict[str, list[ast.FunctionDef]] = {}
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                self.named.setdefault(node.name, []).append(node)

    def called_once(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.Call | None:
        """The one call of a plain function of the file; None where there are several, or where decorators may give others."""
        calls = [call for call in self._calls.get(function.name, []) if isinstance(call.func, ast.Name)]
        method = isinstance(self._parents.get(id(function)), ast.ClassDef)
        alone = len(self.named.get(function.name, [])) == 1 and len(calls) == 1
        spread = alone and any(isinstance(one, ast.Starred) for one in calls[0].args)
        spread = spread or (alone and any(word.arg is None for word in calls[0].keywords))
        return calls[0] if alone and not method and not spread and not function.decorator_list else None

    def parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr | None, bool]]:
        """Yield a function's parameters with what they stand for, and whether fire's command line may say it: what the one call
        gives, else the default where no call gives others and the function is handed to none; None where that is not sure.
        """
        own = function.args
        plain = [*own.posonlyargs, *own.args]
        defaults: dict[str, ast.expr] = {
            one.arg: default for one, default in zip(plain[len(plain) - len(own.defaults) :], own.defaults, strict=True)
        }
        defaults |= {one.arg: value for one, value in zip(own.kwonlyargs, own.kw_defaults, strict=True) if value is not None}
        calls = self._calls.get(function.name, [])
        fired = [one for call in self._calls.get("Fire", []) for one in call.args]
        known = {id(call.func) for call in calls} | {id(one) for one in fired}
        handed = any(id(node) not in known for node in self._loads.get(function.name, []))
        once = self.called_once(function) if not handed else None
        starred = any(isinstance(inner, ast.Starred) for call in calls for inner in call.args)
        for at, one in enumerate((*plain, *own.kwonlyargs)):
            value = None if once is None else argument_of(once, one.arg, at if at < len(plain) else None)
            if value is not None:
                if not (isinstance(value, ast.Name) and value.id == one.arg):  # else the name has the value of its one binding
                    yield one.arg, value, False
                continue
            by_call = starred or any(
                len(call.args) > at or any(word.arg in (one.arg, None) for word in call.keywords) for call in calls
            )
            default = one.arg in defaults and not by_call and not handed and not function.decorator_list
            by_fire = default and any(called(name) == function.name for name in fired)
            yield one.arg, defaults[one.arg] if default else None, by_fire
        for rest in (own.vararg, own.kwarg):
            if rest is not None:
                yield rest.arg, None, False

    def parameter_of(self, call: ast.Call, given: ast.AST) -> str | None:
        """The parameter by which the one function of that name gets an argument; None where that is not sure."""
        found = self.named.get(called(call.func), []) if isinstance(call.func, ast.Name) else []
        if len(found) != 1 or any(isinstance(arg, ast.Starred) for arg in call.args):
            return None
        own = found[0].args
        named = {one.arg for one in (*own.args, *own.kwonlyargs)}
        word = next((one.arg for one in call.keywords if one.value is given), None)
        if word is not None:
            return word if word in named else None
        at = next((place for place, one in enumerate(call.args) if one is given), None)
        plain = [*own.posonlyargs, *own.args]
        return plain[at].arg if at is not None and at < len(plain) else None

    def returned(self, found: Sequence[ast.expr | None]) -> Iterator[str]:
        """Yield the names that functions of the file return where these expressions call them."""
        for one in found:
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Name):
                inner = (node for own in self.named.get(one.func.id, []) for node in ast.walk(own))
                yield from (called(node.value) for node in inner if isinstance(node, ast.Return) and called(node.value))


def argument_of(call: ast.Call, name: str, at: int | None) -> ast.expr | None:
    """The expression that a call gives a parameter, by its name or its place; None for neither."""
    by_name = next((word.value for word in call.keywords if word.arg == name), None)
    return by_name if by_name is not None else call.args[at] if at is not None and at < len(call.args) else None
