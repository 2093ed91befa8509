"""The measured runs: small models of real proportions, by Megatron-LM's own arguments, with its own layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

#: Grouped queries, RMSNorm, rotary positions and a gated MLP, without fused kernels that Apex or TransformerEngine bring.
LLAMA: dict[str, Any] = {
    "model_type": "megatron_gpt",
    "num_layers": 12,
    "hidden_size": 2048,
    "ffn_hidden_size": 5632,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "transformer_impl": "local",
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
}
#: LayerNorm, learned positions, biases and dropout.
GPT: dict[str, Any] = {
    "model_type": "megatron_gpt",
    "num_layers": 12,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "vocab_size": 50257,
    "max_position_embeddings": 1024,
    "transformer_impl": "local",
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: With a LayerNorm: Megatron-Core has an RMSNorm of its own for no sequence parallelism.
SHARED = LLAMA | {"normalization": "LayerNorm"}
#: Experts one after the other, since grouped products need TransformerEngine; routed at random, which is nearly even.
MIXTURE = LLAMA | {
    "num_layers": 8,
    "num_experts": 8,
    "moe_ffn_hidden_size": 2048,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
}
SELECTIVE = {"recompute_granularity": "selective"}


@dataclass(frozen=True)
class Case:
    """One run. Ranks are pp × dp × tp, of which the first of pipeline rank `pp_rank` is measured."""

    id: str
    model: dict[str, Any] = field(default_factory=lambda: LLAMA)
    stage: int = 1
    dp: int = 8
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    pp_rank: int = 0
    micro_batch: int = 1
    seq_len: int = 2048
    grad_accum: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.pp * self.dp * self.tp

    @property
    def place(self) -> int:
        """The measured one."""
        return self.pp_rank * self.ranks // self.pp

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


_GPT: dict[str, Any] = {"model": GPT, "seq_len": 1024}
#: On one GPU; the other ranks are those of torch's fake process group.
CASES = (
    Case("M00"),
    Case("M01", stage=0),
    Case("M02", dp=64),
    Case("M03", grad_accum=4, micro_batch=2),
    Case("M04", tp=2),
    Case("M05", model=SHARED, tp=2, sp=True),
    Case("M06", model=SHARED, tp=4, sp=True, micro_batch=4, dp=16),
    Case("M07", model=LLAMA | FULL, micro_batch=4),
    Case("M08", model=LLAMA | SELECTIVE, micro_batch=2),
    Case("M09", model=SHARED | SELECTIVE, tp=2, sp=True, micro_batch=4),
    Case("M10", model=LLAMA | {"grad_reduce_in_bf16": True}),
    Case("M11", model=LLAMA | {"cross_entropy_loss_fusion": True}, tp=2),
    Case("M12", model=LLAMA | {"overlap_grad_reduce": True}),
    Case("M13", **_GPT),
    Case("M14", **_GPT, tp=2),
    Case("M15", **(_GPT | {"model": GPT | SELECTIVE}), tp=2, sp=True, micro_batch=4),
    Case("M16", **(_GPT | {"model": GPT | FULL}), micro_batch=8),
    Case("M17", pp=2, grad_accum=8),
    Case("M18", pp=2, grad_accum=8, pp_rank=1),
    Case("M19", model=SHARED, pp=4, grad_accum=8, tp=2, sp=True),
    Case("M20", pp=2, vpp=2, grad_accum=8),
    Case("E00", model=MIXTURE),
    Case("E01", model=MIXTURE | {"moe_shared_expert_intermediate_size": 2048, "moe_router_dtype": "fp32"}, grad_accum=2),
    Case("E02", model=MIXTURE | FULL | {"moe_aux_loss_coeff": 0.01}, micro_batch=4),
)
#: On two GPUs over NCCL.
TWO_GPUS = (
    Case("N00", dp=2),
    Case("N01", dp=1, tp=2),
    Case("N02", model=SHARED, dp=1, tp=2, sp=True, micro_batch=2),
    Case("N03", dp=1, pp=2, grad_accum=8),
    Case("N04", model=MIXTURE, dp=2, ep=2),
)
