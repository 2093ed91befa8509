"""A hook of mkdocs: the pages made from docstrings and from the command line's own help, the Python reference and every option.

They are made whenever the documentation is built, so they stand in no file that could be stale.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from zeroplan.report.table import render

#: Modules with what is public in them, in the order of the page; what else a module's ``__all__`` names comes last.
_PUBLIC = {
    "zeroplan": (
        *("estimate", "estimate_zero1_mem", "estimate_zero2_mem", "estimate_zero3_mem", "recommend", "scale", "verify", "tune"),
        *("Plans", "MemoryPlan", "Recommendations", "Recommendation", "Drift", "Measurement", "ZeroplanCallback", "BadInput"),
    ),
    "zeroplan.compat": (
        *("estimate_zero2_model_states_mem_needs_all_live", "estimate_zero2_model_states_mem_needs_all_cold"),
        *("estimate_zero3_model_states_mem_needs_all_live", "estimate_zero3_model_states_mem_needs_all_cold"),
    ),
    "zeroplan.ui.answers": ("answer",),
    "zeroplan_runtime": ("initialize", "Engine"),
}
_SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?([^`]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add both pages."""
    for name, make in {"api.md": api, "options.md": options}.items():
        files.append(File.generated(config, name, content=make()))
    return files


def api() -> str:
    """Every public function and class, with its signature and docstring."""
    out = [
        "# Python reference",
        "",
        "Made from the docstrings. [Python](python.md) shows them at work; sizes are bytes throughout.",
        "",
    ]
    for module, names in _PUBLIC.items():
        home = importlib.import_module(module)
        names = tuple(dict.fromkeys([*names, *getattr(home, "__all__", ())]))
        out += [f"## {module}", ""]
        for name in names:
            out += [f"### {name}", "", *_described(name, getattr(home, name)), ""]
    return "\n".join(out)


def _described(name: str, what: Any) -> Iterator[str]:
    if inspect.isclass(what):
        yield from _class(name, what)
    else:
        yield from ("```py", *_signature(name, what).split("\n"), "```", "")
        yield from _text(inspect.getdoc(what) or "")
        yield from _options(what)


def _class(name: str, what: type[Any]) -> Iterator[str]:
    fields = getattr(what, "model_fields", {})
    yield from _text(inspect.getdoc(what) or "")
    if fields:
        yield from ("", "Fields: " + ", ".join(f"`{field}`" for field in fields) + ".")
    members = [(key, member) for key, member in vars(what).items() if not key.startswith("_")]
    rows = []
    for key, member in members:
        member = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "func", None) or member)
        doc = inspect.getdoc(member) if inspect.isfunction(member) else None
        if doc:
            called = inspect.isfunction(vars(what)[key])
            rows.append([f"`{key}{'()' if called else ''}`", _plain(doc.split("\n\n")[0].replace("\n", " "))])
    if rows:
        yield from ("", render(["member", "what"], rows, "github"))


def _signature(name: str, what: Any) -> str:
    """The signature as it is written, an argument a line where it is long."""
    signature = inspect.signature(what)
    parts = [_unquoted(str(parameter)) for parameter in signature.parameters.values()]
    keyword = [p.kind is p.KEYWORD_ONLY for p in signature.parameters.values()]
    if True in keyword and not any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        parts.insert(keyword.index(True), "*")
    back = _unquoted(str(signature.return_annotation))
    line = f"{name}({', '.join(parts)}) -> {back}"
    return line if len(line) < 100 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n) -> {back}"


def _unquoted(text: str) -> str:
    return text.replace("'", "").replace("typing.", "")


def _options(what: Any) -> Iterator[str]:
    """The arguments behind ``**options: Unpack[...]``."""
    named = re.match(r"Unpack\[(\w+)\]", str(getattr(what, "__annotations__", {}).get("options", "")))
    if named and named[1] != "StageOptions":  # said once, by `estimate`
        source = inspect.getmodule(what)
        imports = [node for node in ast.walk(ast.parse(inspect.getsource(source))) if isinstance(node, ast.ImportFrom)]
        home = next(node.module for node in imports if any(alias.name == named[1] for alias in node.names))
        found = getattr(importlib.import_module(home), named[1])
        yield from ("", "`options`: " + ", ".join(f"`{key}`" for key in typing.get_type_hints(found)) + ".")


def _text(doc: str) -> Iterator[str]:
    """A docstring as Markdown: the sections of arguments become lists."""
    section = ""
    for line in doc.split("\n"):
        head = line.removesuffix(":")
        if line.endswith(":") and head in _SECTIONS:
            section = head
            yield from (f"**{head}**", "")
        elif section and line.startswith("    "):
            begins = not line.startswith("     ") and section not in {"Returns", "Yields"}
            name, colon, rest = line.strip().partition(": ")
            begins = begins and bool(colon) and " " not in name
            yield (
                f"- `{name}`: {_plain(rest)}"
                if begins
                else ("  " if section not in {"Returns", "Yields"} else "") + _plain(line.strip())
            )
        else:
            section = section if not line.strip() else ""
            yield _plain(line)


def _plain(text: str) -> str:
    return _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", text).replace("``", "`")


def options() -> str:
    """Every option of every verb, by the groups of its help."""
    import typer

    from zeroplan.cli import main
    from zeroplan.cli.help import VERBS

    for module in dict.fromkeys(main._MODULES.values()):
        importlib.import_module(f"zeroplan.cli.{module}")
    group: Any = typer.main.get_command(main.app)
    out = [
        "# Every option",
        "",
        "Made from `zeroplan VERB --help`. [The command line](command_line.md) says how values may be written.",
        "",
    ]
    for verbs in VERBS.values():
        for verb in verbs:
            command = group.commands[verb]
            out += [f"## {verb}", "", _plain((command.help or "").strip().split("\n\n")[0].replace("\n", " ")), ""]
            groups: dict[str, list[list[str]]] = {}
            for parameter in command.params:
                named = "`, `".join([*parameter.opts, *parameter.secondary_opts])
                if parameter.param_type_name == "argument":
                    named = parameter.metavar or parameter.name.upper()
                panel = getattr(parameter, "rich_help_panel", None) or ""
                help_text = _plain((getattr(parameter, "help", None) or "").replace("\n", " ")).replace("|", "\\|")
                groups.setdefault(panel, []).append([f"`{named}`", help_text])
            for panel, rows in sorted(groups.items(), key=lambda item: item[0] == ""):
                out += [f"**{panel or 'Output and others'}**", "", render(["option", "what"], rows, "github"), ""]
    return "\n".join(out)
