"""Rules of ``expert_parallel`` (AutoEP) in 0.19.8, which checks the section when the engine is made, whatever the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroplan.core.zero_config import NEWEST_DEEPSPEED
from zeroplan.ds_config.findings import At
from zeroplan.ds_config.rules import Rule, View

_AE, _FOLD, _EN = "module_inject/auto_ep_config.py", "module_inject/auto_ep_folding.py", "runtime/engine.py"
_EP = "expert_parallel"
_USE_ONE = "use one of them"
#: Keys that hold a word, and the words.
_WORDS = {
    "score_apply": ("auto", "pre", "post"),
    "combine_impl": ("auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"),
    "row_weighting_impl": ("auto", "eager", "fused"),
    "gate_up_impl": ("separate", "fused"),
    "comm_backend": ("comm", "deepep"),
    "score_func": ("auto", "softmax", "sigmoid"),
}


def _get(v: View, key: str, default: Any = None) -> Any:
    return v.says(f"{_EP}.{key}", default)


def _on(v: View) -> bool:
    return bool(_get(v, "enabled", False)) and v.zero.deepspeed == NEWEST_DEEPSPEED


def _tp(v: View) -> int:
    return int(v.says("tensor_parallel.autotp_size", 0) or 0)


def _size(v: View) -> int:
    size = _get(v, "autoep_size", 1)
    return size if isinstance(size, int) else 1


def _groups(v: View) -> bool:
    """Return whether the numbers of groups, and of those that tokens are limited to, are possible."""
    groups, limited = _get(v, "num_expert_groups"), _get(v, "num_limited_groups")
    counts = all(one is None or _count(one, 1) for one in (groups, limited))
    return counts and (groups is None or limited is None or limited <= groups)


def _must(key: str, default: Any, takes: Callable[[Any], bool], what: str, remedy: str) -> Rule:
    """Return the rule of one key, whose value an enabled section has to take."""
    return Rule(
        f"autoep.{key}", f"{_EP}.{key}", lambda v: _on(v) and not takes(_get(v, key, default)), what, remedy, source=_AE
    )


def _word(key: str, words: tuple[str, ...]) -> Rule:
    return _must(key, words[0], lambda value: value in words, f"must be {', '.join(words[:-1])} or {words[-1]}", _USE_ONE)


def _count(value: Any, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _attribute(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value != "" and "." not in value)


_PRESETS = ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3")
_ACTIVATIONS = ("swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai")
#: Keys with their defaults, which values they take, and what they have to be.
_VALUES: tuple[tuple[str, Any, Callable[[Any], bool], str], ...] = (
    ("autoep_size", 1, lambda value: _count(value, 1), "a whole number above zero"),
    ("comm_num_sm", 12, lambda value: _count(value, 1), "a whole number above zero"),
    ("comm_qp_margin", 4, lambda value: _count(value, 0), "a whole number, not below zero"),
    ("comm_max_tokens_per_rank", 0, lambda value: _count(value, 0), "a whole number, not below zero"),
    ("preset_model", None, lambda value: value is None or value in _PRESETS, f"one of {', '.join(_PRESETS)}"),
    ("expert_activation", None, lambda value: value is None or value in _ACTIVATIONS, f"one of {', '.join(_ACTIVATIONS)}"),
    ("has_shared_experts", None, lambda value: value is None or isinstance(value, bool), "true or false"),
    ("routed_scaling_factor", "auto", lambda value: value == "auto" or isinstance(value, (int, float)), "a number, or auto"),
    *(
        (name, None, _attribute, "the name of an attribute, without dots")
        for name in (
            *("expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr", "router_pattern", "expert_pattern"),
            *("shared_experts_pattern", "shared_experts_gate_pattern"),
        )
    ),
)


def _value(key: str, default: Any, takes: Callable[[Any], bool], what: str) -> Rule:
    return _must(key, default, takes, f"has to be {what}", "mend it, or leave it out")


def _switch(key: str) -> Rule:
    return _must(key, False, lambda value: isinstance(value, bool), "has to be true or false", "write true or false")


AUTOEP_REFUSALS = (
    *(_word(key, words) for key, words in _WORDS.items()),
    *(_value(*row) for row in _VALUES),
    *(_switch(key) for key in ("validate_folding_routing", "async_split_plan")),
    Rule(
        "autoep.fused_sum",
        f"{_EP}.combine_impl",
        lambda v: (
            _on(v) and _get(v, "combine_impl") == "fused_weighted_sum" and _get(v, "comm_backend") == "deepep" and _size(v) > 1
        ),
        "DeepEP adds a token's rows itself, so that nothing is left to fuse",
        'set comm_backend to "comm", or remove it',
        source=_AE,
    ),
    Rule(
        "autoep.limited_groups",
        f"{_EP}.num_limited_groups",
        lambda v: _on(v) and not _groups(v),
        "groups of experts are at least one, and of them no more are chosen than there are",
        "mend num_expert_groups and num_limited_groups",
        source=_AE,
    ),
    Rule(
        "autoep.load_balance",
        f"{_EP}.load_balance_coeff",
        lambda v: _get(v, "load_balance_coeff") is not None and v.zero.deepspeed == NEWEST_DEEPSPEED,
        "AutoEP adds no loss that balances the experts",
        "remove it",
        source=_AE,
        at=At.CONFIG,
    ),
    Rule(
        "autoep.expert_tp",
        f"{_EP}.expert_tensor_parallel_size",
        lambda v: _on(v) and _get(v, "expert_tensor_parallel_size", 1) != 1,
        "AutoEP shares no matrix of an expert yet",
        "use 1",
        source=_FOLD,
    ),
    Rule(
        "autoep.tp_alone",
        f"{_EP}.autoep_size",
        lambda v: _on(v) and _tp(v) > 1 and _size(v) == 1,
        "AutoTP beside AutoEP needs ranks that share experts: with 1, each of them would count the experts' gradients",
        "use 2 or more, or autotp_size 1",
        source=_FOLD,
    ),
    Rule(
        "autoep.tp_offload",
        "zero_optimization",
        lambda v: _on(v) and _tp(v) > 1 and bool(v.zero.offload_optimizer or v.zero.offload_param),
        "AutoEP with AutoTP does not offload",
        "remove the offload, or use autotp_size 1",
        source=_FOLD,
    ),
    Rule(
        "autoep.deepep_tokens",
        f"{_EP}.comm_max_tokens_per_rank",
        lambda v: _on(v) and _get(v, "comm_backend") == "deepep" and not _get(v, "comm_max_tokens_per_rank", 0),
        "comm_backend deepep makes its buffers for a number of tokens, which is missing",
        "set it to micro batch × longest sequence",
        source=_AE,
    ),
    Rule(
        "autoep.fused_rows",
        f"{_EP}.row_weighting_impl",
        lambda v: (
            _on(v) and _get(v, "row_weighting_impl") == "fused" and (_get(v, "comm_backend") != "deepep" or _size(v) == 1)
        ),
        "fused runs within DeepEP's exchange alone",
        'set comm_backend to "deepep" and autoep_size above 1, or remove it',
        source=_AE,
    ),
    Rule(
        "autoep.fused_gate",
        f"{_EP}.gate_up_impl",
        lambda v: _on(v) and _get(v, "gate_up_impl") == "fused" and _get(v, "use_grouped_mm", True) is False,
        "fused is one grouped product, and use_grouped_mm is false",
        "set use_grouped_mm to true",
        source=_AE,
    ),
    *(
        Rule(
            f"autoep.stage3.{name}",
            where,
            lambda v, holds=holds: _on(v) and v.zero.stage == 3 and holds(v),  # type: ignore[misc]
            f"AutoEP's experts at stage 3 go with no {what}",
            remedy,
            source=f"{_EN}, _validate_zero3_moe_compatibility",
            at=At.RUN,
        )
        for name, where, holds, what, remedy in (
            ("sequence", "sequence_parallel_size", lambda v: (v.says("sequence_parallel_size") or 1) > 1, "Ulysses", "use 1"),
            (
                "gradients",
                "zero_optimization.zero_quantized_gradients",
                lambda v: v.zero.leaf("zero_quantized_gradients"),
                "quantized gradients",
                "set it to false",
            ),
            (
                "hpz",
                "zero_optimization.zero_hpz_partition_size",
                lambda v: v.zero.leaf("zero_hpz_partition_size") > 1,
                "secondary shards",
                "set it to 1",
            ),
        )
    ),
)
