"""Names in a Python script's syntax tree, and the value that its text does not tell."""

from __future__ import annotations

import ast
from typing import Any

#: A value that the text does not tell.
UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda _self: "unknown"})()
#: Methods that change what they are called on.
CHANGING = frozenset(
    ("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove", "sort", "merge_with", "set")
)
#: Calls that rebind names in ways that no text tells.
OPAQUE = ("exec", "globals")
#: Calls that leave a dict or a list as it is.
READING = frozenset(
    (
        *("print", "pprint", "info", "warning", "init_trackers", "initialize", "parse_args", "add_config_arguments"),
        *("len", "dict", "list", "str", "dumps", "dump", "init", "from_pretrained", "isinstance", "sorted"),
        *("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "LoraConfig", "BitsAndBytesConfig"),
        *("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy", "Trainer", "Seq2SeqTrainer", "SFTTrainer"),
        *("DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer"),
    )
)


def called(node: ast.expr | None) -> str:
    """The last name of what is called: ``from_pretrained`` of ``AutoModel.from_pretrained``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def base_name(node: ast.expr) -> str:
    """The name at the front of ``a.b[c].d``; empty where a call or another expression stands there."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def holds_unknown(value: Any) -> bool:
    """Whether a value, or one within it, is not told."""
    if isinstance(value, dict):
        return any(holds_unknown(one) for one in value.values())
    return any(holds_unknown(one) for one in value) if isinstance(value, list) else value is UNKNOWN
