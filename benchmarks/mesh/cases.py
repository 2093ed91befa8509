"""The measured layouts: small models of real proportions under FSDP2, AutoTP and the runtime on meshes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
LLAMA_14: dict[str, Any] = LLAMA | {"num_hidden_layers": 14}  # with embedding and head two blocks' weight for each of 8 stages
QWEN2: dict[str, Any] = LLAMA | {"model_type": "qwen2", "vocab_size": 151936, "num_hidden_layers": 8}
QWEN3: dict[str, Any] = QWEN2 | {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": True}
GEMMA: dict[str, Any] = LLAMA | {
    "model_type": "gemma",
    "head_dim": 128,
    "vocab_size": 64000,
    "num_hidden_layers": 8,
    "tie_word_embeddings": True,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Case:
    """One layout of one model. Ranks are pp × dp × cp × tp; `stage` 2 leaves parameters gathered after the forward.

    `pp_rank` is the pipeline rank that is measured, and `schedule` a name of ``--schedule``. Of the data-parallel ranks, `ep`
    share the experts, and `dp_replicate` groups have replicas of the shards. `apart` says that a stage's only block is a group
    of FSDP2's own, as torchtitan has it, and not part of the stage's.
    """

    id: str
    model: dict[str, Any] = field(default_factory=lambda: LLAMA)
    engine: str = "fsdp2"
    dp: int = 1
    dp_replicate: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    pp: int = 1
    vpp: int = 1
    pp_rank: int = 0
    schedule: str = "1f1b"
    stage: int = 3
    micro_batch: int = 2
    seq_len: int = 2048
    grad_accum: int = 1
    checkpointing: bool = False
    alloc_conf: str = ""
    apart: bool = True

    @property
    def place(self) -> int:
        """The rank that is measured: the last that shares samples, and otherwise the first, of its pipeline rank."""
        return self.pp_rank * self.dp * self.cp * self.tp + (self.cp - 1) * self.tp

    @property
    def ranks(self) -> int:
        """The number of ranks of the run."""
        return self.pp * self.dp * self.cp * self.tp

    def to_dict(self) -> dict[str, Any]:
        """Return the case as plain values."""
        return asdict(self)


CASES = (
    Case("T00", dp=8),
    Case("T01", dp=4, tp=2),
    Case("T02", dp=4, tp=2, sp=True),
    Case("T03", dp=2, tp=4),
    Case("T04", dp=2, tp=4, sp=True),
    Case("T05", dp=1, tp=8, sp=True),
    Case("T06", dp=8, tp=8, sp=True, seq_len=8192),
    Case("T07", dp=8, tp=8, micro_batch=4),
    Case("T08", dp=4, tp=2, sp=True, stage=2),
    Case("T09", QWEN3, dp=4, tp=2),
    Case("T10", QWEN3, dp=2, tp=4, sp=True),
    Case("T11", QWEN2, dp=2, tp=4, sp=True, checkpointing=True),
    Case("T12", dp=4, tp=2, sp=True, grad_accum=3, micro_batch=1),
    Case("T13", GEMMA, dp=4, tp=2, micro_batch=1),
    Case("T14", QWEN2, dp=32, tp=2, sp=True, micro_batch=1, seq_len=4096, checkpointing=True),
    Case("T15", dp=2, tp=4, sp=True, alloc_conf="expandable_segments:True"),
    *(Case(f"P0{i}", dp=2, pp=4, pp_rank=i, stage=2, grad_accum=8, micro_batch=1) for i in range(4)),
    Case("P04", dp=2, pp=4, pp_rank=0, stage=2, grad_accum=8, micro_batch=1, schedule="gpipe"),
    Case("P05", dp=2, pp=4, pp_rank=3, stage=2, grad_accum=8, micro_batch=1, schedule="gpipe"),
    Case("P06", dp=4, tp=2, pp=2, pp_rank=0, stage=2, grad_accum=4),
    Case("P07", dp=4, tp=2, pp=2, pp_rank=1, stage=2, grad_accum=4),
    Case("P08", dp=8, tp=4, pp=4, pp_rank=1, stage=2, grad_accum=8, seq_len=4096, checkpointing=True),
    Case("P09", QWEN2, dp=4, pp=2, pp_rank=1, stage=2, grad_accum=4, micro_batch=1),
    Case("C00", dp=4, cp=2, seq_len=8192, micro_batch=1),
    Case("C01", dp=2, cp=4, seq_len=8192, micro_batch=1, checkpointing=True),
    Case("C02", dp=4, tp=2, sp=True, cp=2, seq_len=8192, micro_batch=1),
    *(
        Case(name, LLAMA_14, dp=2, pp=4, vpp=2, pp_rank=rank, stage=2, grad_accum=8, micro_batch=1, apart=apart)
        for name, rank, apart in (("V00", 0, False), ("V01", 3, False), ("V03", 0, True), ("V04", 3, True))
    ),
    Case("V02", dp=2, pp=2, vpp=2, pp_rank=0, stage=2, grad_accum=4, micro_batch=1, schedule="gpipe"),
    *(
        Case(f"Z0{i}", dp=2, pp=4, pp_rank=rank, stage=2, grad_accum=8, micro_batch=1, schedule="zero-bubble")
        for i, rank in enumerate((0, 1, 3))
    ),
    *(
        Case(
            f"Z0{3 + i}",
            LLAMA_14,
            dp=2,
            pp=4,
            vpp=2,
            pp_rank=rank,
            stage=2,
            grad_accum=8,
            micro_batch=1,
            schedule="zero-bubble",
            apart=apart,
        )
        for i, rank, apart in ((0, 0, False), (1, 1, False), (2, 3, False), (4, 0, True), (5, 3, True))
    ),
    Case("Z06", QWEN2, dp=4, pp=2, pp_rank=1, stage=2, grad_accum=4, micro_batch=1, schedule="zero-bubble"),
    *(
        Case(
            f"F{number}{i}",
            LLAMA_14,
            dp=2,
            pp=4,
            vpp=2,
            pp_rank=rank,
            stage=2,
            grad_accum=count,
            micro_batch=1,
            schedule=schedule,
        )
        for number, (schedule, count) in enumerate((("zbv", 8), ("dualpipev", 10)))
        for i, rank in enumerate((0, 2, 3))
    ),
    *(
        Case(f"F{number}3", QWEN2, dp=4, pp=2, vpp=2, pp_rank=1, stage=2, grad_accum=5, micro_batch=1, schedule=schedule)
        for number, schedule in enumerate(("zbv", "dualpipev"))
    ),
    Case("E00", QWEN3_MOE, dp=8, ep=4),
    Case("E01", QWEN3_MOE, dp=8, ep=8, checkpointing=True),
    Case("E02", QWEN3_MOE, dp=16, ep=4, micro_batch=1, grad_accum=2),
    Case("H00", dp=8, dp_replicate=2),
    Case("M00", QWEN3_MOE, dp=4, tp=2),
    Case("M01", QWEN3_MOE, dp=4, tp=2, sp=True),
    Case("M02", QWEN3_MOE, dp=4, cp=2, seq_len=8192, micro_batch=1),
)
#: On two GPUs, with real collectives.
TWO_GPUS = (
    Case("R00", dp=2),
    Case("R01", tp=2),
    Case("R02", tp=2, sp=True),
    Case("R03", QWEN3, tp=2),
    Case("R04", cp=2, seq_len=8192, micro_batch=1),
    Case("R05", cp=2, seq_len=8192, micro_batch=1, checkpointing=True),
    Case("R06", pp=2, pp_rank=0, stage=2, grad_accum=4, micro_batch=1),
    Case("R07", pp=2, pp_rank=1, stage=2, grad_accum=4, micro_batch=1, schedule="gpipe"),
    Case("R08", pp=2, vpp=2, pp_rank=0, stage=2, grad_accum=4, micro_batch=1),
    Case("R09", pp=2, vpp=2, pp_rank=1, stage=2, grad_accum=4, micro_batch=1),
    Case("R20", pp=2, pp_rank=1, stage=2, grad_accum=4, micro_batch=1, schedule="zero-bubble"),
    Case("R23", pp=2, vpp=2, pp_rank=0, stage=2, grad_accum=4, micro_batch=1, schedule="zbv"),
    Case("R24", pp=2, vpp=2, pp_rank=1, stage=2, grad_accum=6, micro_batch=1, schedule="dualpipev"),
    Case("R10", QWEN3_MOE, dp=2, ep=2),
    Case("R11", QWEN3_MOE, dp=2, ep=2, checkpointing=True),
    Case("R12", engine="deepspeed", tp=2, stage=0, micro_batch=1),
    Case("R13", engine="deepspeed", tp=2, stage=2, micro_batch=1, checkpointing=True),
    Case("R14", engine="zeroplan", tp=2, stage=2),
    Case("R15", engine="zeroplan", tp=2, sp=True, stage=3),
    Case("R18", QWEN3_MOE, engine="zeroplan", dp=2, ep=2, stage=2),
    Case("R19", QWEN3_MOE, engine="zeroplan", dp=2, ep=2, stage=3, checkpointing=True),
    Case("R16", engine="zeroplan", pp=2, pp_rank=1, stage=2, grad_accum=4, micro_batch=1),
    Case("R17", engine="zeroplan", pp=2, pp_rank=1, stage=1, grad_accum=4, micro_batch=1),
    Case("R27", engine="zeroplan", pp=2, pp_rank=0, stage=2, grad_accum=4, micro_batch=1),
    Case("R28", QWEN2, engine="zeroplan", pp=2, pp_rank=1, stage=1, grad_accum=4, micro_batch=1, schedule="gpipe"),
    Case("R25", engine="zeroplan", cp=2, stage=2, seq_len=8192, micro_batch=1),
    Case("R26", engine="zeroplan", cp=2, stage=3, seq_len=8192, micro_batch=1, checkpointing=True),
    Case("R21", QWEN3_MOE, engine="zeroplan", tp=2, stage=2),
    Case("R22", QWEN3_MOE, engine="zeroplan", tp=2, sp=True, stage=3),
    Case("R29", QWEN3_MOE, engine="zeroplan", tp=2, ep=2, stage=2),
    Case("R30", QWEN3_MOE, engine="zeroplan", tp=2, ep=2, sp=True, stage=3),
    Case("R31", engine="zeroplan", pp=2, vpp=2, pp_rank=0, stage=2, grad_accum=4, micro_batch=1),
    Case("R32", engine="zeroplan", pp=2, vpp=2, pp_rank=1, stage=1, grad_accum=4, micro_batch=1, schedule="gpipe"),
    Case("R33", engine="zeroplan", pp=2, pp_rank=1, stage=2, grad_accum=4, micro_batch=1, schedule="zero-bubble"),
    Case("R34", engine="zeroplan", pp=2, vpp=2, pp_rank=0, stage=2, grad_accum=4, micro_batch=1, schedule="zbv"),
    Case("R35", engine="zeroplan", pp=2, vpp=2, pp_rank=1, stage=2, grad_accum=6, micro_batch=1, schedule="dualpipev"),
)
