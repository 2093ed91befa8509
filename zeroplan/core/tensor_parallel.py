"""Tensor parallelism: which parameters of which architectures the ranks share, and what one rank holds of them.

Note [Tensor-parallel plan]
    A column-wise linear layer computes part of its outputs, a row-wise one takes part of its inputs; a pair of them needs one
    collective. The layers are those of transformers' ``base_model_tp_plan``. The embedding is split by rows of its table and
    the head by columns of the logits, as torchtitan does. With a whole vocabulary, as in transformers' plan and DeepSpeed's
    AutoTP, the embedding is whole, and the head's parts of the logits are gathered. What no list names is whole on every rank.

    The experts of a mixture are shared as other MLPs are, but by AutoTP: each rank has every expert, and of its gate and up the
    same part of both (``packed_colwise``), of its down the columns. All ranks route all tokens, and their experts' results are
    summed.

    Sources: Shoeybi et al. 2019, "Megatron-LM", section 3; transformers, ``models/*/configuration_*.py``
    (``base_model_tp_plan``); torchtitan, ``models/llama3/infra/parallelize.py`` (``apply_non_moe_tp``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.expert_parallel import is_expert
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The layers of a block that tensor-parallel ranks share, by their names in the block.

    Attributes:
        columns: column-wise linear layers: weight (out / tp, in), bias (out / tp).
        rows: row-wise linear layers: weight (out, in / tp), bias whole.
        head_norms: norms of single heads. Their weights are whole, but a rank has the heads of its part alone.
        expert_columns, expert_rows: parameters of all experts, (experts, out / tp, in) and (experts, out, in / tp).
        splits_tokens: sequence parallelism of it is modelled.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    head_norms: tuple[str, ...] = ()
    expert_columns: tuple[str, ...] = ()
    expert_rows: tuple[str, ...] = ()
    splits_tokens: bool = True


_LLAMA = TensorPlan(
    columns=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    rows=("self_attn.o_proj", "mlp.down_proj"),
)
_HEAD_NORMS = replace(_LLAMA, head_norms=("self_attn.q_norm", "self_attn.k_norm"))
#: By ``model_type``, the plan of the architectures whose tensor parallelism is modelled.
PLANS: dict[str, TensorPlan] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _HEAD_NORMS,
    "gemma": _LLAMA,
    "gemma2": _LLAMA,
}
_GATE_UP, _DOWN = ("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",)
#: The same of mixtures. DeepSeek's attention is whole on every rank.
MIXTURES: dict[str, TensorPlan] = {
    "mixtral": TensorPlan(_LLAMA.columns[:3], _LLAMA.rows[:1], expert_columns=_GATE_UP, expert_rows=_DOWN),
    "qwen3_moe": replace(_HEAD_NORMS, expert_columns=_GATE_UP, expert_rows=_DOWN),
    "deepseek_v3": TensorPlan(
        columns=("mlp.gate_proj", "mlp.up_proj", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        rows=("mlp.down_proj", "mlp.shared_experts.down_proj"),
        expert_columns=_GATE_UP,
        expert_rows=_DOWN,
        splits_tokens=False,
    ),
}
#: The same of mixtures that only AutoTP divides: transformers' plan of Qwen2-MoE leaves its experts, shared ones too, whole.
_AUTO_TP_MIXTURES: dict[str, TensorPlan] = {"qwen2_moe": _LLAMA}
#: Styles of transformers' plans that AutoTP does not know, by architecture. It then rejects the whole plan.
_UNKNOWN_TO_AUTO_TP: dict[str, tuple[str, ...]] = {
    "mixtral": ("moe_tp_experts", "packed_colwise"),
    "qwen3_moe": ("moe_tp_experts", "packed_colwise"),
    "olmoe": ("moe_tp_experts", "packed_colwise", "rowwise_split_input"),
    "deepseek_v2": ("mla_kv_a_proj", "moe_tp_experts", "packed_colwise"),
    "deepseek_v3": ("moe_tp_experts", "packed_colwise"),
    "phi3": ("rowwise_split_input",),
    "olmo2": ("rowwise_split_input",),
    "olmo3": ("rowwise_split_input",),
}
#: The architectures whose division by AutoTP is modelled.
AUTO_TP_PLANS = (*PLANS, *_AUTO_TP_MIXTURES)
EMBEDDING, HEAD = "embed_tokens", "lm_head"


def auto_tp_divides(name: str) -> bool:
    """Return whether AutoTP puts a layer of its own in the place of a parameter's, by the parameter's full name."""
    module = name.rpartition(".")[0]
    return any(module.endswith(end) for end in (*_LLAMA.columns, *_LLAMA.rows, HEAD))


def auto_tp_rejects(model_type: str) -> str:
    """Return why AutoTP rejects transformers' plan of an architecture; empty where it does not.

    Source: DeepSpeed 0.19.8, module_inject/tp_plan_converter.py (SUPPORTED_STYLES)
    """
    styles = _UNKNOWN_TO_AUTO_TP.get(model_type, ())
    return f"AutoTP rejects {model_type}'s tp_plan for its partition styles {', '.join(styles)}" if styles else ""


def tensor_plan(model_type: str, *, auto_tp: bool = False) -> TensorPlan:
    """Return the plan of an architecture, or what AutoTP makes of it.

    Raises:
        BadInput: none is known for it, or AutoTP rejects it.
    """
    if auto_tp and (why := auto_tp_rejects(model_type)):
        raise BadInput(
            why,
            where="--tp",
            remedy="use --engine fsdp2, or write tensor_parallel.partition_config, whose layers are in no figure",
        )
    mixtures = _AUTO_TP_MIXTURES if auto_tp else MIXTURES
    plan = PLANS.get(model_type) or mixtures.get(model_type)
    if plan is None:
        known = ", ".join((*PLANS, *mixtures))
        raise BadInput(
            f"tensor parallelism of {model_type or 'this model'} is not modelled", where="--tp", remedy=f"of {known} it is"
        )
    return plan


def require_divides(config: Mapping[str, Any], layout: ParallelLayout, seq_len: int | None) -> None:
    """Refuse degrees that do not divide the model's heads, widths or tokens.

    Args:
        seq_len: tokens a sample; None where that is not known.
    """
    tp = layout.tp
    heads = config.get("num_attention_heads")
    numbers = {
        "attention heads": heads,
        "KV heads": config.get("num_key_value_heads") or heads,
        "channels of the MLP": config.get("intermediate_size"),
        "words of the vocabulary": config.get("vocab_size"),
    }
    if "moe_intermediate_size" in config and not (layout.whole_vocabulary or layout.experts_across):
        numbers["channels of an expert"] = config["moe_intermediate_size"]
    if layout.sp:
        numbers["tokens of a sample"] = seq_len
    for what, number in numbers.items():
        if isinstance(number, int) and number % tp:
            raise BadInput(
                f"tp {tp} does not divide the {number:,} {what}", where="--tp", remedy=f"use a divisor of {number:,}"
            )


def local_parameters(
    parameters: Parameters, model_type: str, tp: int, *, whole_vocabulary: bool = False, whole_experts: bool = False
) -> Parameters:
    """Return what one of `tp` tensor-parallel ranks holds of a model's parameters: the same list with the shapes of its parts.

    Args:
        parameters: the whole model's.
        model_type: names the plan.
        whole_vocabulary: the embedding is whole on every rank.
        whole_experts: so are the matrices of the experts that are chosen from.

    Raises:
        BadInput: where the architecture's plan is not known, or only the number of parameters is.
    """
    if tp == 1:
        return parameters
    if parameters.stand_in:
        raise BadInput(
            "a count of parameters does not tell which ones are shared",
            where="--tp",
            remedy="give the model's id or config.json",
        )
    plan = tensor_plan(model_type, auto_tp=whole_vocabulary)
    shapes = zip(parameters.names, parameters.blocks, parameters.shapes, strict=True)
    split = (HEAD,) if whole_vocabulary else (EMBEDDING, HEAD)
    local = tuple(
        shape if whole_experts and is_expert(name) else _local(_dimension(plan, name, block, split), shape, tp)
        for name, block, shape in shapes
    )
    return replace(parameters, shapes=local)


def _dimension(plan: TensorPlan, name: str, block: str, split: tuple[str, ...]) -> int | None:
    """The dimension in which a parameter is split; None for one that is whole on every rank."""
    owner, _, leaf = (name[len(block) + 1 :] if block else name).rpartition(".")
    if not block:
        return 0 if owner.rpartition(".")[2] in split else None
    if owner in plan.columns:
        return 0
    if (packed := f"{owner}.{leaf}") in (*plan.expert_columns, *plan.expert_rows):
        return 1 if packed in plan.expert_columns else 2
    return 1 if owner in plan.rows and leaf == "weight" else None


def _local(dimension: int | None, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    return tuple(-(-size // tp) if d == dimension else size for d, size in enumerate(shape))
