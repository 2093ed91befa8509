"""Liger's kernels: head and loss fused, RMSNorm, SwiGLU, GEGLU and rotary embeddings (Hsu et al. 2024, arXiv 2410.10989).

What each keeps is told by :mod:`zeroplan.trace.liger`. Which kernels a family gets is Liger's table, by ``model_type``: one
that it does not list runs as it is, and of those that it lists some are not modelled, and counted as they are.

Source: liger-kernel 0.8.5, transformers/monkey_patch.py, applied to a built model (``_apply_liger_kernel_to_instance``), as
transformers does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.errors import BadInput
from zeroplan.core.generation import Generation
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Compilation
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape

_BEFORE = dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm"), True)
_AROUND = ("norm", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_HEADS = ("q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a family runs by Liger.

    Attributes:
        norms: names of the modules of RMSNorm, and whether the gradient of each lies where its output's was.
        gated: the MLPs' SwiGLU or GEGLU.
        rotary: the rotary embedding of queries and keys.
        head: head and loss, fused.
        loss: the loss alone, over the model's logits.
    """

    norms: Mapping[str, bool]
    gated: bool = True
    rotary: bool = True
    head: bool = True
    loss: bool = False


_LLAMA = Kernels(_BEFORE)
_GLM4 = dict.fromkeys(
    ("norm", "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"), False
)
_OLMO = {"norm": True, "post_attention_layernorm": False, "post_feedforward_layernorm": False}
_EXAONE = dict.fromkeys(("norm", "post_attention_layernorm", "post_feedforward_layernorm", *_HEADS), False)
#: Families by ``model_type``.
FAMILIES: dict[str, Kernels] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "smollm3", "phi3", "gemma", "hunyuan_v1_dense"), _LLAMA),
    "qwen3": replace(_LLAMA, norms={**_BEFORE, **dict.fromkeys(_HEADS, True)}),
    "granite": replace(_LLAMA, head=False, loss=True),
    "gemma2": Kernels(dict.fromkeys(_AROUND, False)),
    "gemma3_text": Kernels(dict.fromkeys((*_AROUND, *_HEADS), False)),
    "olmo2": Kernels(_OLMO),
    "olmo3": Kernels(_OLMO),
    "glm4": Kernels(_GLM4, rotary=False),
    "exaone4": Kernels(_EXAONE),
}
#: Families that Liger lists and nothing here models: experts, images, gates of other kinds.
OTHERS = frozenset(
    ("deepseek_v2", "deepseek_v3", "deepseek_v4", "falcon_h1", "gemma3", "gemma4", "gemma4_text", "glm4v", "glm4v_moe",
     "gpt_oss", "hunyuan_v1_moe", "internvl", "llama4", "llama4_text", "llava", "mixtral", "mllama",
     "mllama_text_model", "muse_glimmer", "nemotron", "paligemma", "pixtral", "qwen2_5_vl", "qwen2_5_vl_text",
     "qwen2_vl", "qwen2_vl_text", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
     "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "smolvlm")
)  # fmt: skip
#: The parts that programs switch one by one.
PARTS = ("rope", "rms_norm", "glu", "fused_loss", "loss")
USUAL = ("rope", "rms_norm", "glu", "fused_loss")


@dataclass(frozen=True, slots=True)
class Liger:
    """Liger's kernels are on: those of `parts`, as far as the family has them."""

    parts: tuple[str, ...] = USUAL

    @property
    def key(self) -> str:
        """A short name for tapes."""
        return "liger-0.8.5" + ("" if self.parts == USUAL else "".join(f"+{part}" for part in self.parts))

    def kernels(self, model_type: str) -> Kernels | None:
        """Return what a family runs; None where it runs as written."""
        found = FAMILIES.get(model_type)
        if found is None:
            return None
        return Kernels(
            norms=found.norms if "rms_norm" in self.parts else {},
            gated=found.gated and "glu" in self.parts,
            rotary=found.rotary and "rope" in self.parts,
            head=found.head and "fused_loss" in self.parts,
            loss="loss" in self.parts or (found.loss and "fused_loss" in self.parts),
        )

    def running(self, model: Any) -> AbstractContextManager[None]:
        """Let a model run with the kernels while the context lasts."""
        kernels = self.kernels(str(getattr(model.config, "model_type", "")))
        if kernels is None:
            return nullcontext()
        from zeroplan.trace.liger import liger_kernels

        return liger_kernels(model, kernels)


class LigerTechnique(Technique[Liger]):
    """Liger's kernels."""

    name = "Liger"
    kind = Liger
    where = "--liger"
    liger = Option(bool, False, "Liger's kernels: head and loss fused, RMSNorm, SwiGLU, RoPE.", WORK, page=True, without=RUNS)
    #: Of files that switch them one by one; names of :data:`PARTS`, by comma.
    liger_parts = Option(str, "", "", WORK, without=RUNS)
    keys: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **{program: {"use_liger_kernel": "liger"} for program in ("hf-trainer", "ms-swift", "open-instruct")},
        "trl": {"use_liger_kernel": "liger", "use_liger": "liger"},
        "llama-factory": {"enable_liger_kernel": "liger"},
    }
    #: Switches of axolotl's plugin, and the parts that they mean.
    plugin: ClassVar[Mapping[str, str]] = {
        "liger_rope": "rope",
        "liger_rms_norm": "rms_norm",
        "liger_glu_activation": "glu",
        "liger_swiglu": "glu",
        "liger_fused_linear_cross_entropy": "fused_loss",
        "liger_cross_entropy": "loss",
    }
    engines = ("ddp", "fsdp", "fsdp2", "deepspeed")
    refusal = "Liger's kernels are not modelled under {engine}"
    remedy = "use --engine ddp, fsdp2, fsdp or deepspeed"

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Liger | None:
        """Return the kernels that the options ask for."""
        parts = tuple(filter(None, asked[LigerTechnique.liger_parts].split(",")))
        if parts:
            return Liger(tuple(part for part in PARTS if part in parts))
        return Liger() if asked[LigerTechnique.liger] else None

    def require(self, value: Liger, facts: Facts) -> None:
        """Refuse the fused loss where a program has another one."""
        super().require(value, facts)
        work = facts.workload
        objective = work.objective
        other = work.batch.pairs or objective.kl_batch or objective.reference is not None or objective.pair_loss is not None
        if "fused_loss" in value.parts and (other or work.has(Generation)):
            what = "Liger's losses of pairs and of generated samples are not modelled"
            raise BadInput(what, where=self.where, remedy="leave it out: what is counted then is more")

    def require_degrees(self, value: Liger, facts: Facts) -> None:
        """Refuse ranks that share a model."""
        self.require_unshared(facts, "Liger's kernels over ranks that share a model are not modelled")

    def left_out(self, value: Liger, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return what is counted as the model's own."""
        says = ""
        if facts.spec.model_type in OTHERS:
            says = f"Liger's kernels for {facts.spec.model_type} keep fewer tensors; the model's own are counted"
        elif facts.workload.has(Compilation):
            says = "Liger's kernels within compiled blocks are not modelled; the model's own are counted"
        return (Unmodelled(self.where, Effect.LESS, says),) if says else ()

    @classmethod
    def layers_alone(cls, program: str, task: str | None) -> str | None:
        """Return what is said where a program's key switches on Liger's layers without its head; None where it has both.

        TRL has a head of its own in SFT, DPO, KTO and GRPO, and whole logits in ORPO and CPO: 1.16 takes Liger's losses in none
        (``trainer/dpo_trainer.py``); neither does LLaMA-Factory 0.9.6 (``require_logits``). A classifier has no such head at
        all, on which Liger's forward ends.
        """
        if program != "trl" and task in (None, "sft", "pretrain"):
            return None
        if task == "reward":
            return "Liger's forward asks for a language model's head, which a classifier has not: the run would end"
        return "" if program in ("trl", "llama-factory") else "Liger's loss of this task is not modelled; logits are counted"

    @classmethod
    def head_key(cls, program: str) -> str:
        """Return the key by which a program computes head and loss together; empty where it has none."""
        if cls.layers_alone(program, "sft") is not None:
            return ""
        keys = cls.plugin if program == "axolotl" else cls.keys.get(program, {})
        return next((key for key, part in keys.items() if part in ("liger", "fused_loss")), "")

    def setting(self, value: Liger) -> bool | None:
        """Return that all kernels are on; None where a file switches some of them off."""
        return True if value == Liger() else None

    def instructions(self, value: Liger) -> tuple[str, ...]:
        """Return which kernels a program has to take."""
        return (f"take Liger's kernels ({', '.join(value.parts)})",)

    def described(self, value: Liger) -> Mapping[str, Any]:
        """Return what a report's JSON shows."""
        return {"liger": True}
