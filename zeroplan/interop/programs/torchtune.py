"""torchtune: its recipes' YAML, and ``tune run`` with one.

Source: torchtune main of April 2026, ``recipes/full_finetune_distributed.py``, ``recipes/lora_finetune_*.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.adapters import optimizer_of
from zeroplan.interop.programs.builder import Builder, Keys
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.machine import take_machine
from zeroplan.interop.programs.program import Program
from zeroplan.interop.setups import Setup

MORE, LESS, UNKNOWN = Effect.MORE, Effect.LESS, Effect.UNKNOWN
_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_NOT_MODELLED = {
    "enable_activation_offloading": (LESS, "activations wait on the host between forward and backward"),
    "optimizer_in_bwd": (LESS, "each parameter is stepped in the backward, so gradients never stand together"),
    "tensor_parallel_dim": (UNKNOWN, "ranks share each matrix"),
    "context_parallel_dim": (UNKNOWN, "ranks share each sequence"),
    "expert_parallel_dim": (UNKNOWN, "ranks share the experts"),
    "data_parallel_replicate_dim": (UNKNOWN, "replicas of the shard group"),
    "enable_fp8_training": (UNKNOWN, "fp8 products"),
    "teacher_model": (MORE, "a teacher beside the trained model"),
    "quantizer": (UNKNOWN, "quantisation-aware training"),
    "custom_sharded_layers": (LESS, "embedding and head are units of their own"),
    "run_val_every_n_steps": (UNKNOWN, "validation batches are not in the figures"),
}
#: Optimizers by their classes, as the readers of names know them.
_CLASSES = {
    "bitsandbytes.optim.pagedadamw8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.pagedadamw": "paged_adamw_32bit",
    "bitsandbytes.optim.adamw8bit": "adamw_8bit",
    "bitsandbytes.optim.adamw": "adamw_hf",
    "torchao.optim.adamw8bit": "adamw_torch_8bit",
    "torchao.optim.adamw4bit": "adamw_torch_4bit",
    "torchao.prototype.low_bit_optim.adamw8bit": "adamw_torch_8bit",
    "torchao.prototype.low_bit_optim.cpuoffloadoptimizer": "adamw_torch_fused",
}
_SINGLE = re.compile(r"single[-_]?device|low_memory")
#: Keys of recipes that train.
_TRAINS = ("optimizer", "epochs", "training", "max_steps_per_epoch")
_TASKS = (("dpo", "dpo"), ("ppo", "ppo"), ("grpo", "grpo"), ("kd", "distillation"), ("qat", "sft"))


class Torchtune(Program):
    """A YAML of components: the distributed recipes shard by FSDP2, the single-device ones run on one GPU without it."""

    name = "torchtune"
    title = "torchtune"
    version = "0.7"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Blocks that are components of torchtune's."""
        if started := document.starts("tune run"):
            return started
        return tuple(
            key for key in ("model", "tokenizer", "checkpointer") if "torchtune." in _component(document.data.get(key))
        )

    def read(self, document: Document) -> Setup:
        """The run. Its model code is torchtune's own, so activations of transformers' model stand in.

        Raises:
            BadInput: a recipe that evaluates, generates or quantises, or runs on the CPU.
        """
        run = Builder(document, self.name, self.label)
        if document.command is None and not document.has(*_TRAINS):
            what = "does not train: it has no optimizer"
            raise BadInput(what, where=run.name, remedy="give the config of a recipe that trains")
        if (run.word("device") or "cuda") == "cpu":
            raise BadInput("asks for training on the CPU", where=f"{run.name}: device", remedy="plans are of runs on GPUs")
        model = run.block("model")
        component = _component(model.data)
        if frozen := sorted(key for key in model.data if key.endswith("_trainable")):
            says = "parts of the model are frozen or adapted by themselves; the plan treats all alike"
            run.leave_out(f"model.{frozen[0]}", UNKNOWN, says)
        words = f"{document.name} {document.command.program if document.command else ''}".lower()
        said = next((task for word, task in _TASKS if re.search(rf"[\W_]{word}[\W_]", words)), "sft")
        run.set("task", said)
        if said in ("dpo", "ppo", "grpo", "distillation"):
            run.leave_out(f"task {said}", MORE, "more models or samples than one forward and backward of micro batch × length")
        checkpointer = run.block("checkpointer")
        folder = checkpointer.text("checkpoint_dir")
        if folder:
            run.set("model", folder, "checkpointer.checkpoint_dir")
        run.count("micro_batch", "batch_size", default=1)
        run.count("grad_accum", "gradient_accumulation_steps", default=1)
        self._length(run)
        dtype = _DTYPES.get(run.word("dtype") or "", "fp32")
        run.set("dtype", dtype, "dtype")
        run.set("model_dtype", dtype, "dtype")
        run.set("autocast", False)
        optimizer = run.block("optimizer")
        name = _component(optimizer.data).lower()
        known = _CLASSES.get(name, name.rpartition(".")[2] or "adamw")
        fused = optimizer.data.get("fused") is True
        row, kind = optimizer_of(run, "optimizer._component_", "adamw_torch_fused" if known == "adamw" and fused else known)
        run.set("optimizer", row, "optimizer._component_")
        run.set("optimizer_kind", kind)
        if "cpuoffload" in name:
            run.leave_out("optimizer._component_", LESS, "states on the host; they are counted on the GPU")
        again = bool(run.flag("enable_activation_checkpointing"))
        run.set("gradient_checkpointing", again, "enable_activation_checkpointing")
        self._engine(run, words)
        self._adapter(run, model, component)
        run.leave_out_flags(_NOT_MODELLED)
        if run.on("compile"):  # each layer by itself, and the loss (torchtune, training/_compile.py)
            run.take_compile("blocks", "compile", backend=None, mode=None)
        run.leave_out("model._component_", UNKNOWN, "torchtune's own model code keeps other tensors than transformers'")
        if "LinearCrossEntropy" in _component(run.value("loss")) or "Chunked" in _component(run.value("loss")):
            run.leave_out("loss._component_", LESS, "each chunk's probabilities are kept, and no logits; both are counted")
        return run.setup(self.name)

    def _length(self, run: Builder) -> None:
        length = run.block("tokenizer").number("max_seq_len")
        packed = run.block("dataset").flag("packed") if isinstance(run.data.get("dataset"), Mapping) else None
        if length is not None:
            run.set("seq_len", length, "tokenizer.max_seq_len")
        else:
            run.leave_out("tokenizer.max_seq_len", UNKNOWN, "nothing bounds the length of a sample; give --seq-len")
        if packed:
            run.keys["packed"] = "dataset.packed"

    def _engine(self, run: Builder, words: str) -> None:
        distributed = "distributed" in words or bool(run.document.has("fsdp_cpu_offload", "tensor_parallel_dim"))
        if _SINGLE.search(words) and not distributed:
            run.set("engine", "ddp")
            run.set("gpus", 1)
            return
        if not distributed:
            run.assume("a distributed recipe: the name does not say single_device")
        run.set("engine", "fsdp2")
        run.set("sync_each", True)  # its loop never delays a reduction
        run.set("stage", 2 if run.flag("fsdp_reshard_after_forward") is False else 3)
        if run.flag("fsdp_cpu_offload"):
            run.set("offload_optimizer", "cpu", "fsdp_cpu_offload")
            run.set("offload_param", "cpu", "fsdp_cpu_offload")
        take_machine(run)

    def _adapter(self, run: Builder, model: Keys, component: str) -> None:
        name = component.rpartition(".")[2]
        if not name.startswith(("lora_", "qlora_")) and "lora_rank" not in model.data:
            run.set("method", "full")
            return
        quantised = name.startswith("qlora_") or bool(model.flag("quantize_base"))
        run.set("method", "qlora" if quantised else "lora")
        if quantised:
            run.leave_out("model._component_", UNKNOWN, "base weights in NF4 are counted in 16 bits")
        rank = model.number("lora_rank")
        if rank is None:
            rank = 8
            run.assume("model.lora_rank 8")
        run.set("lora_rank", rank, "model.lora_rank")
        if model.amount("lora_dropout"):
            run.set("lora_dropout", True, "model.lora_dropout")
        attention = ["o_proj" if layer == "output_proj" else layer for layer in model.texts("lora_attn_modules")]
        mlp = ["gate_proj", "up_proj", "down_proj"] if model.flag("apply_lora_to_mlp") else []
        run.set("lora_targets", (*attention, *mlp), "model.lora_attn_modules")
        if model.flag("apply_lora_to_output"):
            run.leave_out("model.apply_lora_to_output", MORE, "an adapter on the head")
        if model.flag("use_dora"):
            run.leave_out("model.use_dora", MORE, "DoRA keeps normed copies of the adapted weights")


def _component(value: Any) -> str:
    """Return the component that a block names."""
    found = value.get("_component_") if isinstance(value, Mapping) else None
    return found if isinstance(found, str) else ""
