"""Operations, conditions and comparisons on values that a Python script's text tells."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from zeroplan.interop.programs.script_syntax import UNKNOWN

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def _operated(node: ast.BinOp, of: Callable[[ast.expr], Any]) -> Any:
    """The value of an operation on two known ones; none that makes a long text or a huge number."""
    left, right = of(node.left), of(node.right)
    done = _OPERATORS.get(type(node.op))
    sizes = all(isinstance(one, str | list) or abs(one) < 1 << 40 for one in (left, right) if one is not UNKNOWN)
    repeats = isinstance(node.op, ast.Mult | ast.Mod) and any(isinstance(one, str | list) for one in (left, right))
    known = left is not UNKNOWN and right is not UNKNOWN and sizes and not repeats
    return done(left, right) if done is not None and known else UNKNOWN


def computed(node: ast.expr, of: Callable[[ast.expr], Any]) -> Any:
    """The value of an operation, a condition or a comparison; ``of`` returns those of its parts."""
    if isinstance(node, ast.UnaryOp):
        value = of(node.operand)
        if value is UNKNOWN:
            return UNKNOWN
        return not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else UNKNOWN
    if isinstance(node, ast.BinOp):
        return _operated(node, of)
    if isinstance(node, ast.IfExp):
        test = of(node.test)
        return UNKNOWN if test is UNKNOWN else of(node.body if test else node.orelse)
    if isinstance(node, ast.BoolOp):
        for one in node.values:
            value = of(one)
            if value is UNKNOWN or bool(value) is isinstance(node.op, ast.Or):
                return value
        return value
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        left, right = of(node.left), of(node.comparators[0])
        known = left is not UNKNOWN and right is not UNKNOWN
        return _COMPARISONS[type(node.ops[0])](left, right) if known else UNKNOWN
    return of(node.value) if isinstance(node, ast.NamedExpr) else UNKNOWN
