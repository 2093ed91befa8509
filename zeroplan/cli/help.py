"""Help of the verbs: options in groups, two examples each. And the right name of an option that others call otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from zeroplan.core.errors import did_you_mean

#: Every verb, by what it is for, in the order of the help.
VERBS = {
    "Plan": ("capture", "estimate", "recommend", "scale", "explain", "diff", "ui"),
    "Check": ("check", "verify", "tune", "doctor"),
    "Look up": ("trace", "models", "gpus"),
}

#: Options that other programs have and that are no argument of ours by another name, and what to write here.
_OTHER_FLAGS = {
    "--bf16": "--dtype bf16",
    "--fp16": "--dtype fp16",
    "--fp32": "--dtype fp32",
    "--cpu-offload": "--offload-optimizer cpu",
    "--offload": "--offload-optimizer cpu, --offload-param cpu or both",
    "--fsdp": "--engine fsdp2",
    "--ddp": "--engine ddp",
    "--qlora": "--quantize nf4 --lora-rank 16",
    **dict.fromkeys(("--load-in-4bit", "--4bit"), "--quantize nf4"),
    **dict.fromkeys(("--load-in-8bit", "--8bit"), "--quantize int8"),
    **dict.fromkeys(("--flash-attn", "--flash-attention", "--use-flash-attn", "--flash-attention-2"), "--attn flash"),
    "--world-size": "--gpus (of a node) and --nodes",
    **dict.fromkeys(("--lr", "--learning-rate", "--epochs", "--num-train-epochs"), "nothing: no byte depends on it"),
    "--model": "MODEL itself, without a flag",
    "--model-name-or-path": "MODEL itself, without a flag",
}


def synonyms() -> dict[str, str]:
    """Return options by the names that other programs give them, and what to write here."""
    from zeroplan.planner.options import OTHER_NAMES

    named = {_flag(other): _flag(ours) + more for other, (ours, more) in OTHER_NAMES.items()}
    return named | _OTHER_FLAGS


def _shared_flags() -> frozenset[str]:
    """Return the flags of a run's options, which most verbs share; a verb's other flags are its own."""
    from zeroplan.run.ask import OPTIONS

    return frozenset(flag for option in OPTIONS.values() if option.flag for flag in option.flag.split("/"))


def _flag(name: str) -> str:
    return "--" + name.lower().lstrip("-").replace("_", "-")


def right_name(word: str, known: list[str]) -> str:
    """Return the text to write in place of an option that does not exist: its name here, or the nearest names, or nothing."""
    flag = _flag(word).partition("=")[0]
    found = synonyms().get(flag)
    return f"write {found}" if found else did_you_mean(flag, known)


#: Options that most questions need. ``--help`` shows these, and those that a verb has alone.
_COMMON = frozenset(
    (
        *("--micro-batch", "--seq-len", "--grad-accum", "--dtype", "--gradient-checkpointing", "--lora-rank"),
        *("--gpus", "--gpu", "--vram", "--engine", "--stage", "--offload-optimizer", "--ds-config", "--from"),
    )
)


def _named_flags(words: Sequence[str]) -> frozenset[str]:
    """Return the flags of the techniques that a command line names by one of them."""
    from zeroplan.techniques.table import TABLE

    named = {word.partition("=")[0] for word in words}
    each = [{flag for option in one.options if option.flag for flag in option.flag.split("/")} for one in TABLE]
    return frozenset(flag for flags in each if flags & named for flag in flags)


class Verb(TyperCommand):
    """A verb whose help lists its options by group, and below them the examples, which are its epilog's lines.

    Attributes:
        wanted: the word behind ``--help``: ``all`` for every option, another one for those that have it in their name or text;
            empty for the common ones, and those of the techniques that the command line names.
    """

    wanted = ""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group, arguments and options of no group first."""
        groups: dict[str, list[tuple[str, str]]] = {}
        shared, shown = _shared_flags(), _COMMON | _named_flags(sys.argv)
        hidden = 0
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            flags = set(parameter.opts)
            matches = self.wanted == "all" or self.wanted.lower() in " ".join(record or ()).lower()
            if record is not None and not (matches if self.wanted else not shared & flags or shown & flags):
                hidden += 1
            elif record is not None:
                option = parameter.param_type_name == "option"
                group = getattr(parameter, "rich_help_panel", None) or ("Options" if option else "Arguments")
                groups.setdefault(group, []).append(record)
        if self.wanted and not groups:
            formatter.write_paragraph()
            formatter.write_text(f"No option has {self.wanted!r} in its name or text.")
        last = groups.pop("Options", [])
        for name, records in [*groups.items(), ("Options", last)]:
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if hidden:
            formatter.write_paragraph()
            others = "others" if self.wanted else "more options, for techniques, parallelism and files"
            find = "" if self.wanted else "; one by a word: --help lora"
            formatter.write_text(f"{hidden} {others}: {ctx.command_path} --help all{find}")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they are: a command must not be wrapped."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class Verbs(TyperGroup):
    """The verbs, grouped by what they are for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all registered verbs in the order of :data:`VERBS`."""
        return [name for names in VERBS.values() for name in names if name in self.commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group of verbs."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for group, names in VERBS.items():
            with formatter.section(group):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])
