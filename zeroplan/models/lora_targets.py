"""The layers that LoRA adapts, where users name them by a regular expression or leave them to peft."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

from zeroplan.core.errors import BadInput
from zeroplan.models.lora import ALL_LINEAR
from zeroplan.models.spec import ModelSpec

#: Stands for the layers that peft adapts where its config names none.
PEFT_DEFAULT = "peft-default"
#: peft 0.21, ``utils/constants.py``, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING: by model_type.
_QV = ("q_proj", "v_proj")
_PEFT_DEFAULTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "llama4", "mistral", "mixtral", "stablelm", "gemma", "gemma2", "gemma3_text"), _QV),
    **dict.fromkeys(("qwen2", "qwen3", "opt", "gptj", "gpt_neo", "bart"), _QV),
    **dict.fromkeys(("t5", "mt5"), ("q", "v")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("bloom", "gpt_neox", "falcon", "chatglm"), ("query_key_value",)),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "layoutlm"), ("query", "value")),
    "deberta-v2": ("query_proj", "value_proj"),
    "deberta": ("in_proj",),
    "codegen": ("qkv_proj",),
    "mpt": ("Wqkv",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
}
_LINEAR = ("linear", "conv1d", "head")
_SPECIAL = re.compile(r"[\\*+|^$()\[\]?]")
#: A repeated group that holds a repetition takes time that is exponential in the name's length.
_NESTED = re.compile(r"\([^()]*[*+{][^()]*\)[*+{]")
_MOST_REPEATS, _MOST_SECONDS, _LONGEST = 4, 2.0, 300


def is_pattern(target: str) -> bool:
    """Return whether a target is a regular expression: names of layers hold none of its signs."""
    return _SPECIAL.search(target) is not None


def named_targets(spec: ModelSpec, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the targets as names of layers, as peft finds them.

    Args:
        spec: the base model.
        targets: names, one regular expression that full names of modules must match as a whole, or :data:`PEFT_DEFAULT`.

    Returns:
        Last parts of names where those mean exactly the matched layers, else full names; none for all linear layers, which peft
        knows by a word that it takes alone.

    Raises:
        BadInput: a pattern that is none, that costs too much time, or that matches no layer; an architecture for which peft
            has no default.
    """
    if [target.lower() for target in targets] == [ALL_LINEAR]:
        return ()
    if tuple(targets) == (PEFT_DEFAULT,):
        if spec.model_type not in _PEFT_DEFAULTS:
            raise BadInput(
                f"peft has no default targets for {spec.model_type}", where="LoRA targets", remedy="name them by --lora-targets"
            )
        return _PEFT_DEFAULTS[spec.model_type]
    patterns = [target for target in targets if is_pattern(target)]
    if not patterns:
        return tuple(targets)
    if len(targets) > 1:
        raise BadInput("a pattern stands beside other targets", where="LoRA targets", remedy="give one pattern, or names")
    modules = list(_linear_modules(spec))
    matched = _matching(patterns[0], modules)
    if not matched:
        raise BadInput(
            f"{patterns[0][:80]!r} matches no linear layer of {spec.name}", where="LoRA targets", remedy=_layers(modules)
        )
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in matched)
    meant = {name for name in modules if name.rpartition(".")[2] in leaves}
    return tuple(leaves) if meant == set(matched) else tuple(matched)


def _linear_modules(spec: ModelSpec) -> Iterator[str]:
    """Yield the full names of the linear layers, in order."""
    for unit in spec.units:
        names = list(unit.names())
        layers = dict.fromkeys(tensor.name.rpartition(".")[0] for tensor in unit.tensors if tensor.kind in _LINEAR)
        for prefix in names:
            yield from (f"{prefix}.{layer}" if prefix and layer else prefix or layer for layer in layers)


def _matching(pattern: str, modules: Sequence[str]) -> list[str]:
    """Return the modules that the pattern matches as a whole. Source: peft, tuners/tuners_utils.py
    (check_target_module_exists).
    """
    repeats = sum(map(pattern.count, "*+{"))
    if len(pattern) > _LONGEST or repeats > _MOST_REPEATS or _NESTED.search(pattern):
        raise BadInput(
            f"{pattern[:60]!r} may take too long to match", where="LoRA targets", remedy="write fewer repetitions, or names"
        )
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadInput(
            f"{pattern[:60]!r} is no pattern ({error})", where="LoRA targets", remedy="mend it, or write names"
        ) from None
    began, found = time.perf_counter(), []
    for name in modules:
        if time.perf_counter() - began > _MOST_SECONDS:
            raise BadInput(f"{pattern[:60]!r} takes too long to match", where="LoRA targets", remedy="write names")
        if compiled.fullmatch(name):
            found.append(name)
    return found


def _layers(modules: Sequence[str]) -> str:
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in modules)
    return f"its linear layers are {', '.join(list(leaves)[:12]) or 'none'}"
