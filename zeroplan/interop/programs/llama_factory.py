"""LLaMA-Factory: its YAML and JSON, and command lines of ``llamafactory-cli train`` or ``src/train.py``.

Source: LLaMA-Factory 0.9.6, ``src/llamafactory/hparams/``, ``model/adapter.py``, ``model/model_utils/checkpointing.py``.
"""

from __future__ import annotations

import re

from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.preferences import PairLoss
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.adapters import frozen_parts, set_adapters, set_attention, set_float8, set_quantisation
from zeroplan.interop.programs.builder import Builder
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.known import arguments_of, telling_of_others
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.trainer import read_trainer
from zeroplan.interop.setups import Setup
from zeroplan.techniques.freeze import FreezeRule

MORE, LESS, UNKNOWN, NONE = Effect.MORE, Effect.LESS, Effect.UNKNOWN, Effect.NONE
#: Scripts of its repository.
_SCRIPT = re.compile(r"(^|/)src/(train\w*|llamafactory/[\w/]+)\.py$")
_STAGES = {"pt": "pretrain", "sft": "sft", "rm": "reward", "ppo": "ppo", "dpo": "dpo", "kto": "kto"}
#: Arguments that no other program here has; ``stage`` counts where its value is one of LLaMA-Factory's.
_ONLY = (
    *("finetuning_type", "cutoff_len", "lora_target", "pref_beta", "pref_loss", "pref_ftx", "dataset_dir", "tokenized_path"),
    *("quantization_bit", "flash_attn", "enable_liger_kernel", "use_unsloth_gc", "pure_bf16", "freeze_trainable_layers"),
    *("disable_gradient_checkpointing", "image_max_pixels", "neat_packing", "mix_strategy", "val_size", "use_badam"),
    *("use_adam_mini", "galore_rank", "apollo_rank", "additional_target", "mixture_of_depths", "visual_inputs", "badam_mode"),
)
#: Keys of the trainer that ``USE_V1`` starts, and of Megatron's.
_NEW_FORMAT = ("model_class", "dist_config", "kernel_config", "train_dataset", "peft_config")
_MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_NOT_MODELLED = {
    "use_unsloth": (LESS, "Unsloth's kernels keep fewer tensors"),
    "shift_attn": (UNKNOWN, "shifted sparse attention"),
    "upcast_lmhead_output": (MORE, "fp32 logits beside those of the head"),
    "upcast_layernorm": (MORE, "norms in fp32"),
    "use_llama_pro": (UNKNOWN, "blocks are added and only those are trained"),
    "mixture_of_depths": (UNKNOWN, "mixture of depths"),
    "resize_vocab": (MORE, "rows are added to embedding and head"),
    "use_mca": (UNKNOWN, "Megatron's engine"),
    "use_megatron_bridge": (UNKNOWN, "Megatron's engine"),
    "use_ray": (NONE, "workers started by Ray"),
    "use_kt": (UNKNOWN, "experts computed on the host"),
    "use_galore": (UNKNOWN, "GaLore's states follow each matrix's projection rank; AdamW's are counted"),
    "use_apollo": (UNKNOWN, "APOLLO's states follow each matrix's projection rank; AdamW's are counted"),
    "use_badam": (LESS, "BAdam steps one block at a time; states of all are counted"),
    "use_adam_mini": (LESS, "Adam-mini keeps one second moment a block; one an element is counted"),
    "use_asft_loss": (MORE, "a reference model beside the trained one"),
    "ref_model": (MORE, "a reference model beside the trained one"),
    "reward_model": (MORE, "a reward model beside the trained one"),
    "compute_accuracy": (UNKNOWN, "predictions of the evaluation are kept"),
}
_MOST_BLOCKS = 1000
_TASKS = {
    "dpo": (
        MORE,
        "chosen and rejected samples pass together, and a reference model is held unless adapters are switched off for it",
    ),
    "kto": (MORE, "a second pass for the KL term, and a reference model"),
    "ppo": (MORE, "generation, a value head, a reward model and a reference model"),
    "reward": (MORE, "chosen and rejected samples pass together, under a value head"),
}


class LlamaFactory(Program):
    """A recipe: LoRA unless ``finetuning_type`` says otherwise, checkpointing unless it is disabled."""

    name = "llama-factory"
    title = "LLaMA-Factory"
    version = "0.9.6"
    base = "hf-trainer"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return the arguments that only LLaMA-Factory has, or its command."""
        if started := document.starts("llamafactory-cli train"):
            return started
        if document.defaults is not None and not self.starts_own(document):
            return ()
        strange = "base_model" in document.data or telling_of_others(document.data, "hf-trainer", "llama-factory")
        found = () if strange else document.has(*_ONLY)
        if document.has(*_NEW_FORMAT) and not found:
            return document.has(*_NEW_FORMAT)
        if "model_name_or_path" not in document.data:
            return ()
        return (*found, "stage") if found and str(document.data.get("stage")) in _STAGES else found

    def starts_own(self, document: Document) -> bool:
        """Whether a command is LLaMA-Factory's, or starts a script by one of its names."""
        program = document.command.program if document.command else ""
        return program.startswith("llamafactory-cli") or _SCRIPT.search(program) is not None

    def could_own(self, document: Document) -> bool:
        """A model, a dataset and a template, and nothing that is not its own."""
        known = arguments_of("hf-trainer", "llama-factory")
        return len(document.has("model_name_or_path", "dataset", "template")) == 3 and all(
            key in known for key in document.data
        )

    def read(self, document: Document) -> Setup:
        """Read the run.

        Raises:
            BadInput: as :meth:`Program.read`; or a file of the trainer that has other keys, or of Megatron's engine.
        """
        run = Builder(document, self.name, self.label)
        if document.has(*_NEW_FORMAT):
            raise BadInput("is a file of LLaMA-Factory's v1 trainer", where=run.name, remedy="its keys are not read yet")
        if document.has(*_MEGATRON):
            raise BadInput("trains by Megatron-Core", where=run.name, remedy="no engine here plans that")
        stage = run.word("stage")
        if stage is None:
            run.assume("stage sft", task="sft")
        else:
            run.set("task", _STAGES.get(stage, stage), "stage")
        read_trainer(run)
        if run.fields.get("engine") is None:
            run.set("engine", "ddp")
        run.take_model("model_name_or_path")
        run.count("seq_len", "cutoff_len", default=2048)
        set_attention(run, "flash_attn")
        off = run.flag("disable_gradient_checkpointing")
        again = not off
        if off is None:
            run.assumed = [clause for clause in run.assumed if not clause.startswith("gradient_checkpointing ")]
            run.assume("blocks are checkpointed: disable_gradient_checkpointing is not set", gradient_checkpointing=True)
        run.set("gradient_checkpointing", again, "" if off is None else "disable_gradient_checkpointing")
        if again and run.flag("use_unsloth_gc"):
            run.set("offload_checkpoints", True, "use_unsloth_gc")
        self._method(run)
        run.leave_out_flags(_NOT_MODELLED)
        set_float8(run, Float8Recipe.ROWWISE)
        if run.flag("neat_packing") and run.fields.get("attn") != "flash":
            run.leave_out("neat_packing", MORE, "packed samples are one row, whose mask grows with the square of its length")
        if run.value("use_muon") and run.flag("use_muon"):
            run.set("optimizer", "muon", "use_muon")
            run.set("optimizer_kind", None)
        task = run.fields["task"]
        if task == "dpo" and not run.document.has("ref_model") and self._pairs(run):
            pass
        elif task in _TASKS:
            run.leave_out("stage", *_TASKS[task])
        return run.setup("hf-trainer", "llama-factory")

    def _pairs(self, run: Builder) -> bool:
        """Set pairs through a loss of all logits; returns whether all of it is known, which a second model's dtype is not.

        ORPO and SimPO ask no reference; else it is the model without adapters.
        """
        alone = run.word("pref_loss") in ("orpo", "simpo")
        adapters = run.fields.get("lora_rank") is not None
        if not alone and not adapters:
            return False
        run.set("pairs", True)
        run.set("pair_loss", PairLoss.SOFTMAX.value)
        if not alone:
            run.set("reference", "base")
        run.assume("pref_loss sigmoid" if run.word("pref_loss") is None else "all pairs are as long as cutoff_len")
        return True

    def _freezes(self, run: Builder, method: str) -> None:
        """Set what is frozen: towers of a model with images or sound, unless a key says otherwise, and under freeze all but the
        last two blocks.
        """
        named = {"projector": "freeze_multi_modal_projector", "language": "freeze_language_model"}
        parts = frozen_parts(run, vision="freeze_vision_tower", **named)
        if method == "full":
            run.set("freeze_rule", FreezeRule("freeze_vision_tower", parts, half=True, skips_frozen=True) if parts else None)
            return
        blocks = run.number("freeze_trainable_layers", least=-_MOST_BLOCKS)
        if run.flag("use_llama_pro"):
            return  # which is left out by its own name
        modules, beside = (tuple(run.texts(f"freeze_{one}_modules")) for one in ("trainable", "extra"))
        blocks = 2 if blocks is None else blocks
        rule = FreezeRule("finetuning_type", parts, (), blocks, modules or ("all",), beside, half=True, skips_frozen=True)
        run.set("freeze_rule", rule, "finetuning_type")

    def _method(self, run: Builder) -> None:
        """Set what is trained, and the dtype in which the base weights are kept."""
        method = run.word("finetuning_type")
        if method is None:
            run.assume("finetuning_type lora")
            method = "lora"
        bits = run.value("quantization_bit")
        if bits:
            by = run.word("quantization_method") or "bnb"
            set_quantisation(run, "quantization_bit", str(bits), nested=run.flag("double_quantization") is not False, by=by)
        pure = run.flag("pure_bf16")
        if pure:
            run.set("dtype", "bf16", "pure_bf16")
        if method in ("lora", "dora"):
            set_adapters(run, rank="lora_rank", targets="lora_target", default_rank=8, quantised=bool(bits))
            run.set("model_dtype", run.fields["dtype"])
        else:
            run.set("method", method)
            # Under DDP what is trained is fp32 beside frozen 16 bits.
            beside = method == "freeze" and not {"ds_config", "state_dict"} & run.fields.keys()
            run.set("model_dtype", run.fields["dtype"] if pure or beside else "fp32")
        if method in ("full", "freeze"):
            self._freezes(run, method)
        elif method == "oft":
            run.leave_out("finetuning_type", UNKNOWN, "OFT's blocks are not modelled; all parameters are counted as trained")
