"""What is read of a Python script, and what is left out of it by line."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from zeroplan.core.errors import BadInput
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.interop.programs.script_syntax import holds_unknown
from zeroplan.interop.programs.script_values import Values

#: Arguments that move no memory, or none that a plan counts.
HARMLESS = re.compile(
    r"output_dir|run_name|report_to|logging|learning_rate|warmup|weight_decay|lr_scheduler|seed|num_train_epochs|max_steps|save_"
    r"|hub_|push_to_hub|adam_|max_grad_norm|disable_tqdm|dataloader|remove_unused|load_best|metric_for|greater_is|label_names"
    r"|group_by|ddp_find|eval_steps|dataset_|beta$|tf32|log_level|ignore_data|full_determinism|include_|project|do_train|trackio"
)


@dataclass(frozen=True, slots=True)
class RunScript:
    """What a script's text says of its run.

    Attributes:
        program: the short name of the program whose arguments it builds.
        data: arguments by name, adapters and quantisation by the names that the program's files have.
        task: what it does, where its trainer tells.
        head: the head of its model, where the class tells.
        left_out: what the text does not tell, and what it does that no plan holds.
        assumed: what was taken for granted, one clause each.
        open: fields that no line tells, with what is missing.
    """

    program: str
    data: Mapping[str, Any]
    task: str = ""
    head: str | None = None
    left_out: tuple[Unmodelled, ...] = ()
    assumed: tuple[str, ...] = ()
    open: Mapping[str, str] = field(default_factory=dict)


def parsed(text: str, name: str) -> ast.Module:
    """Parse a script's text. Raises BadInput: it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadInput("is no Python that can be parsed", where=name, remedy="mend it, or give the run's arguments") from None


class Reader:
    """What all readers of a script share: what they took, and what they leave out.

    Args:
        values: what the text tells.
        name: of the file.
    """

    def __init__(self, values: Values, name: str) -> None:
        self.values, self.name = values, name
        self.calls = [node for node in values.nodes if isinstance(node, ast.Call) and values.reached(node) is not False]
        self.data: dict[str, Any] = {}
        self.left_out: list[Unmodelled] = []
        self.assumed: list[str] = []
        self.open: dict[str, str] = {}
        self.classes = {node.name: node for node in values.nodes if isinstance(node, ast.ClassDef)}

    def named(self, *names: str) -> list[ast.Call]:
        """Calls of these names, or of classes of the file that derive from one."""
        own = {cls.name for cls in self.classes.values() if any(self.values.name_of(base) in names for base in cls.bases)}
        return [call for call in self.calls if self.values.name_of(call.func) in names or self.values.name_of(call.func) in own]

    def kind(self, call: ast.Call) -> str:
        """The library's class that a call makes, also by a class of the file."""
        name = self.values.name_of(call.func)
        cls = self.classes.get(name)
        return name if cls is None else next((self.values.name_of(base) for base in cls.bases), name)

    def leave_out(self, key: str, node: ast.AST, effect: Effect, says: str) -> None:
        """List what no plan holds, by the line of its node; once for each key."""
        if all(one.key != key for one in self.left_out):
            line = getattr(node, "lineno", None)  # a whole script has none
            self.left_out.append(Unmodelled(key, effect, (says if line is None else f"line {line}: {says}")[:120]))

    def found(self, program: str, data: Mapping[str, Any], *, head: str | None, task: str = "") -> RunScript:
        """Return what was read, with the parser's defaults among what was assumed."""
        if self.values.taken:
            defaults = sorted(self.values.taken)
            self.assumed.append(f"the defaults of {', '.join(f'--{one}' for one in defaults[:6])}")
        return RunScript(
            program=program,
            data=data,
            task=task,
            head=head,
            left_out=tuple(self.left_out),
            assumed=tuple(self.assumed),
            open=self.open,
        )

    def cut_lengths(self) -> dict[int, int]:
        """The lengths to which calls cut samples, with a line of each; empty where the text does not tell one of them."""
        found: dict[int, int] = {}
        for call in self.calls:
            if not any(one.arg == "truncation" for one in call.keywords):
                continue
            for key, value, node in self.values.keywords(call):
                if key == "max_length" and (isinstance(value, bool) or not isinstance(value, int)):
                    return {}
                if key == "max_length":
                    found.setdefault(value, node.lineno)
        return found

    def refuse(self, what: str) -> NoReturn:
        """Refuse the script."""
        remedy = f"zeroplan capture -- python {self.name} runs it; or give its ds_config, or its arguments as JSON or YAML"
        raise BadInput(what, where=self.name, remedy=remedy)

    def argument(self, key: str, value: Any, node: ast.expr) -> None:
        """Take an argument, or list it where its value is not told and may move memory."""
        if holds_unknown(value):
            if key == "**" or not HARMLESS.match(key):
                self.leave_out(
                    "arguments" if key == "**" else key, node, Effect.UNKNOWN, f"{ast.unparse(node)[:50]} is not told"
                )
            return
        self.data[key] = value  # None, too: it stands in the place of a default


def first_argument(call: ast.Call, key: str) -> ast.expr | None:
    """A call's first argument, or the one of that name."""
    found = next((one.value for one in call.keywords if one.arg == key), None)
    return found if found is not None else call.args[0] if call.args and not isinstance(call.args[0], ast.Starred) else None
