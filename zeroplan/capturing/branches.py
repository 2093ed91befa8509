"""Whether a branch on an invented value could change what a script takes."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from typing import Any

from zeroplan.capturing.source import CodeLine

#: Names in a condition that asks whether values are finite, which those of training are.
_FINITE = frozenset(("isnan", "isinf", "isfinite", "found_inf", "overflow"))
#: Calls that allocate nothing on a GPU, by the last part of their names.
_SAYS = frozenset(("print", "warn", "warning", "warning_once", "info", "debug", "error", "exit", "log", "close", "finish",
                   "flush", "time", "perf_counter", "destroy_process_group", "barrier", "end_training", "format",
                   "join"))  # fmt: skip


@lru_cache(maxsize=256)
def changes_nothing(line: CodeLine, holds: bool) -> bool:
    """Return whether the arm that is not taken is known to take no more memory: it raises, leaves, skips or prints.

    Args:
        line: where the condition is read.
    """
    node = _deciding(line)
    if node is None:
        return False
    names = {getattr(one, "attr", getattr(one, "id", "")) for one in ast.walk(node.test)}
    if isinstance(node, ast.Assert) or names & _FINITE:
        return True
    if not isinstance(node, ast.If):
        return False
    negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
    if isinstance(node.test, ast.BoolOp):  # either arm may be the one that is not taken
        return all(map(_is_nothing, (*node.body, *node.orelse)))
    return all(map(_is_nothing, node.orelse if holds != negated else node.body))


def goes_on(line: CodeLine) -> bool | None:
    """The truth of a value of a ``while`` loop's condition with which the loop goes on; None where no such loop asks."""
    node = _deciding(line)
    if not isinstance(node, ast.While):
        return None
    return not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not))


@lru_cache(maxsize=64)
def tree_of(file: str) -> ast.Module | None:
    """A file's syntax; None where it is no Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def may_allocate(statement: ast.stmt) -> bool:
    """Return whether a statement may put something on a GPU: it calls what is not known to do no such thing."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        return False
    return any(isinstance(one, ast.Call) and _name(one) not in _SAYS for one in ast.walk(statement))


def _name(call: ast.Call) -> str:
    called: Any = call.func
    return str(getattr(called, "attr", getattr(called, "id", "")))


@lru_cache(maxsize=256)
def _deciding(line: CodeLine) -> Any:
    """The innermost statement or expression whose condition lies on a line; None for none."""
    tree = tree_of(line.file)
    if tree is None:
        return None
    inside: list[tuple[int, Any]] = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.If, ast.Assert, ast.While, ast.IfExp)):
            continue
        test = node.test
        if min(node.lineno, test.lineno) <= line.line <= (test.end_lineno or test.lineno):
            inside.append((test.lineno, node))
    return max(inside, key=lambda one: one[0])[1] if inside else None


def _is_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Raise, ast.Pass, ast.Continue, ast.Break)):
        return True
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _name(statement.value) in _SAYS
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
