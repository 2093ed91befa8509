"""Lets the loops of a person's own files end after the steps asked for, so that what follows them runs.

Note [Loops that end]
    The files are compiled with their lines unchanged: ``for x in it`` goes over ``begun(place, it)``, which returns the
    iterator and remembers it, and ``while test`` becomes ``while goes_on(place) and test``. A loop's iterator is brought to its
    end in the midst of a turn, so that the turn is completed and Python leaves the loop as it ever does.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.machinery
import sys
import weakref
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from zeroplan.capturing.branches import may_allocate, tree_of
from zeroplan.capturing.source import CodeLine, is_users

_BEGUN, _GOES_ON = "__loop_begun__", "__loop_goes_on__"
_LOOPS = (ast.For, ast.While)
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: Each `for` loop's iterator by its place: file, line and column.
_iterators: dict[tuple[str, int, int], Any] = {}
#: Loops of either kind that have begun.
_begun_places: set[tuple[str, int, int]] = set()
#: Loops that are to end and have not yet come to their next turn.
_pending: dict[tuple[str, int, int], Any] = {}


class _Turns:
    """Goes over an iterator that cannot be brought to its end from outside."""

    def __init__(self, turns: Any) -> None:
        self._turns, self.over = turns, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.over:
            raise StopIteration
        return next(self._turns)


#: Iterators over ranges, which hold nothing else.
_RANGES = (type(iter(range(0))), type(iter(range(1 << 70))))


def _begun(place: tuple[str, int, int], turns: Any) -> Any:
    found = iter(turns)
    if type(found) not in (*_RANGES, GeneratorType) and not type(found).__module__.startswith("zeroplan."):
        found = _Turns(found)
    _pending.pop(place, None)
    # A loop that breaks lets its iterator go, and what that holds on the GPU.
    _iterators[place] = found if type(found) in _RANGES else weakref.ref(found)
    _begun_places.add(place)
    return found


def _goes_on(place: tuple[str, int, int]) -> bool:
    _begun_places.add(place)
    return _pending.pop(place, None) is None


def _end(place: tuple[str, int, int]) -> None:
    """Let the turn of a loop that runs be its last."""
    found: Any = _iterators.get(place)
    found = found() if isinstance(found, weakref.ref) else found
    _pending[place] = True
    if isinstance(found, _Turns):
        found.over = True
    elif hasattr(found, "close"):
        found.close()
    elif hasattr(found, "__setstate__"):
        found.__setstate__(sys.maxsize)


class _Rewritten(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self._file = file

    def _call(self, node: Any, name: str, *more: ast.expr) -> ast.expr:
        at = more[0] if more else node.test
        place: Any = (self._file, node.lineno, node.col_offset)
        call = ast.Call(ast.Name(name, ast.Load()), [ast.Constant(place), *more], [])
        return ast.fix_missing_locations(ast.copy_location(call, at))

    def visit_For(self, node: ast.For) -> ast.AST:
        """Remember the iterator."""
        self.generic_visit(node)
        node.iter = self._call(node, _BEGUN, node.iter)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        """Ask before the condition."""
        self.generic_visit(node)
        node.test = ast.copy_location(ast.BoolOp(ast.And(), [self._call(node, _GOES_ON), node.test]), node.test)
        return node


def compiled(source: Any, file: str, mode: str = "exec", *args: Any, **kwargs: Any) -> Any:
    """Return a file's code, as ``compile`` does, with loops that can be ended; see Note [Loops that end]."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        tree = ast.parse(source, file, mode)
        return compile(_Rewritten(file).visit(tree), file, mode, *args, **kwargs)
    return compile(source, file, mode, *args, **kwargs)  # which says what is wrong with it


def install() -> None:
    """Compile the person's modules, and the script itself, with loops that can be ended."""
    import runpy

    home: Any = builtins
    setattr(home, _BEGUN, _begun)
    setattr(home, _GOES_ON, _goes_on)
    script: Any = runpy
    script.compile = compiled  # shadows Python's own within that module
    loader: Any = importlib.machinery.SourceFileLoader
    own = loader.get_code

    def get_code(self: Any, name: str) -> Any:
        path = self.get_filename(name)
        return compiled(self.get_data(path), path, dont_inherit=True) if is_users(path) else own(self, name)

    loader.get_code = get_code


def end_loops(*, all_of_them: bool) -> CodeLine | None:
    """End the innermost loop of the person's files that runs, or all; returns its line, None where none can be ended.

    Of one that is about to end already the line is returned alone.
    """
    first: CodeLine | None = None
    for frame in _users_frames():
        file = frame.f_code.co_filename
        for node in _around(file, frame.f_lineno):
            place = (file, getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
            if not isinstance(node, _LOOPS) or place not in _begun_places:
                continue
            if first is None:
                first = CodeLine(file, node.lineno)
                if place in _pending:
                    return first
            _end(place)
            if not all_of_them:
                return first
    return first


def what_follows() -> CodeLine | None:
    """The first line of the person's behind the loops that run which may put something on a GPU; None for none."""
    behind: list[CodeLine] = []
    for frame in _users_frames():
        file, line = frame.f_code.co_filename, frame.f_lineno
        for node in _around(file, line):
            if isinstance(node, ast.With) and any("capture" in ast.unparse(one.context_expr) for one in node.items):
                return next(iter(behind), None)
            for part in ("body", "orelse", "finalbody"):
                rest: list[ast.stmt] = getattr(node, part, [])
                at = next((n for n, one in enumerate(rest) if _holds(one, line)), len(rest))
                behind += [CodeLine(file, one.lineno) for one in rest[at + 1 :] if may_allocate(one)]
            if isinstance(node, _LOOPS):
                behind.clear()
    return next(iter(behind), None)


def _users_frames() -> Iterator[Any]:
    """Yield the frames of the person's code that run, from the innermost."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _holds(node: ast.AST, line: int) -> bool:
    first: int = min([one.lineno for one in getattr(node, "decorator_list", ())], default=getattr(node, "lineno", 0))
    last: int = getattr(node, "end_lineno", 0)
    return first <= line <= last


def _around(file: str, line: int) -> list[ast.AST]:
    """The statements around a line, from the innermost, and the function or file that holds them."""
    node: ast.AST | None = tree_of(file)
    chain: list[ast.AST] = []
    while node is not None:
        chain = [node] if isinstance(node, _SCOPES) else [node, *chain]
        inside = [
            one for one in ast.iter_child_nodes(node) if isinstance(one, (ast.stmt, ast.excepthandler)) and _holds(one, line)
        ]
        node = inside[-1] if inside else None
    return chain
