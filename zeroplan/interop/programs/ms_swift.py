"""ms-swift: command lines of ``swift sft``, ``pt`` and ``rlhf``, and the same arguments in a YAML.

Source: ms-swift 4.6, ``swift/arguments/`` and ``swift/config/`` (the ds_configs that have names).
"""

from __future__ import annotations

from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import read_document
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.adapters import BYTES, frozen_parts, set_adapters, set_attention, set_quantisation
from zeroplan.interop.programs.builder import Builder
from zeroplan.interop.programs.document import Document, find_named_file
from zeroplan.interop.programs.known import telling_of_others
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.trainer import TrainerDefaults, read_trainer, set_fsdp
from zeroplan.interop.setups import Setup
from zeroplan.techniques.freeze import FreezeRule

MORE, LESS, UNKNOWN = Effect.MORE, Effect.LESS, Effect.UNKNOWN
_COMMANDS = ("swift sft", "swift pt", "swift rlhf", "megatron sft", "megatron pt", "megatron rlhf")
_ONLY = (
    *("train_type", "sft_type", "tuner_type", "rlhf_type", "target_regex", "freeze_vit", "freeze_llm", "freeze_aligner"),
    *(
        "split_dataset_ratio",
        "model_author",
        "attn_impl",
        "quant_bits",
        "vit_gradient_checkpointing",
        "use_hf",
        "model_id_or_path",
    ),
)
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_NOT_MODELLED = {
    "padding_free": (LESS, "samples are laid end to end without padding"),
    "sequence_parallel_size": (UNKNOWN, "ranks share each sequence"),
    "deepspeed_autotp_size": (UNKNOWN, "ranks share each matrix"),
    "use_galore": (UNKNOWN, "GaLore's states follow each matrix's projection rank"),
    "target_parameters": (MORE, "adapters on parameters that are no layers"),
    "freeze_parameters_regex": (LESS, "frozen parameters are counted as trained"),
    "freeze_parameters_ratio": (LESS, "frozen parameters are counted as trained"),
    "trainable_parameters": (UNKNOWN, "which parameters are trained is the command's own choice"),
    "use_logits_to_keep": (LESS, "logits of the labelled positions alone"),
    "optimizer": (UNKNOWN, "an optimizer plugin of ms-swift's own"),
    "reward_model": (MORE, "a reward model beside the trained one"),
    "teacher_model": (MORE, "a teacher beside the trained model"),
    "ref_model": (MORE, "a reference model beside the trained one"),
    "acc_strategy": (Effect.NONE, "how accuracy is counted"),
}
_TASKS = {"rm": "reward"}
#: Megatron-LM's arguments, of which the YAML of ``megatron sft`` and of ms-swift's trainers under Ray has some.
_MEGATRON = (
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "pipeline_model_parallel_size",
    "recompute_granularity",
)


class MsSwift(Program):
    """LoRA of rank 8 on all linear layers unless ``tuner_type`` says otherwise; micro batch 1, checkpointing."""

    name = "ms-swift"
    title = "ms-swift"
    version = "4.6"
    base = "hf-trainer"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return ms-swift's command, or the arguments that only it has."""
        if started := document.starts(*_COMMANDS):
            return started
        script = self.starts_own(document)
        if document.defaults is not None and not script:
            return ()
        strange = "base_model" in document.data or telling_of_others(document.data, "hf-trainer", self.name)
        return document.has(*_ONLY) if script or not strange else ()

    def starts_own(self, document: Document) -> bool:
        """Whether a command is ms-swift's, or starts one of its files."""
        program = document.command.program if document.command else ""
        return bool(document.starts(*_COMMANDS)) or program.endswith(("swift/cli/sft.py", "swift/cli/rlhf.py"))

    def read(self, document: Document) -> Setup:
        """Read the run. Raises BadInput: as :meth:`Program.read`; or a run by Megatron-Core."""
        run = Builder(document, self.name, self.label)
        started = document.command.program if document.command else ""
        if started.startswith("megatron") or document.has(*_MEGATRON):
            raise BadInput(f"{started or 'this'} trains by Megatron-Core", where=run.name, remedy="no engine here plans that")
        self._task(run, started)
        run.take_model("model", "model_id_or_path")
        self._engine_files(run)
        read_trainer(run, TrainerDefaults(micro_batch=1, checkpointing=True, bf16=True))
        if run.fields.get("engine") is None:
            run.set("engine", "ddp")
        elif run.fields.get("reentrant") is None:
            run.set("reentrant", True)  # trainers/mixin.py (_fix_gradient_checkpointing)
        self._evaluation(run)
        weights = run.word("torch_dtype")
        if weights in _DTYPES:
            run.set("model_dtype", _DTYPES[weights], "torch_dtype")
            if "dtype" not in run.keys:
                run.set("dtype", _DTYPES[weights], "torch_dtype")
        else:
            run.assume("torch_dtype of the checkpoint", model_dtype=run.fields["dtype"])
        if run.flag("packing") and run.number("packing_length") is not None:
            run.count("seq_len", "packing_length")
        elif run.number("max_length") is not None:
            run.count("seq_len", "max_length")
        else:
            run.leave_out("max_length", UNKNOWN, "samples are as long as the model's window; give --seq-len")
        set_attention(run, "attn_impl")
        self._method(run)
        run.leave_out_flags(_NOT_MODELLED)
        return run.setup("hf-trainer", "ms-swift", known=frozenset(_ONLY))

    def _task(self, run: Builder, started: str) -> None:
        if started.endswith(" pt"):
            run.set("task", "pretrain")
        elif started.endswith(" rlhf") or "rlhf_type" in run.data:
            kind = run.word("rlhf_type") or "dpo"
            run.set("task", _TASKS.get(kind, kind), "rlhf_type")
            run.leave_out("rlhf_type", MORE, f"{kind}: pairs of samples, further models or generation beside the trained model")
        else:
            run.set("task", "sft")

    def _evaluation(self, run: Builder) -> None:
        """Evaluation as often as it saves, where there is data for it. Source: arguments/sft_args.py (_init_eval_strategy)."""
        data = next((key for key in ("val_dataset", "cached_val_dataset", "split_dataset_ratio") if run.on(key)), None)
        strategy = run.word("eval_strategy") or run.word("evaluation_strategy") or run.word("save_strategy") or "steps"
        if data is None or strategy == "no":
            run.set("eval_batch", None)
        else:
            batch = run.number("per_device_eval_batch_size")
            run.set("eval_batch", batch or 1, "per_device_eval_batch_size" if batch else data)

    def _engine_files(self, run: Builder) -> None:
        """Put in place the ds_configs and FSDP configs that ms-swift brings by name."""
        name = run.data.get("deepspeed")
        if isinstance(name, str) and name in _NAMED:
            run.data = {**run.data, "deepspeed": named_ds_config(name)}
            hpz = run.number("zero_hpz_partition_size")
            if hpz:
                run.data["deepspeed"]["zero_optimization"]["zero_hpz_partition_size"] = hpz
        name = run.data.get("fsdp")
        if isinstance(name, str) and name == "fsdp2":
            run.data = {key: value for key, value in run.data.items() if key != "fsdp"}
            run.data["gradient_checkpointing"] = True
            set_fsdp(run, "fsdp", version=2, reshard="true", offload=False, hybrid=False, checkpointing=True)
        elif isinstance(name, str) and name.endswith(".json"):
            options = read_document(str(find_named_file(name, run.document, "fsdp")))
            run.data = {**run.data, "fsdp": options.get("fsdp", "full_shard"), "fsdp_config": options.get("fsdp_config", {})}

    def _method(self, run: Builder) -> None:
        key = next((key for key in ("tuner_type", "train_type", "sft_type") if key in run.data), "tuner_type")
        method = run.word(key)
        if method is None:
            run.assume("tuner_type lora")
            method = "lora"
        bits = run.value("quant_bits") or run.value("quantization_bit")
        if bits:
            key = "quant_bits" if "quant_bits" in run.data else "quantization_bit"
            nested = run.flag("bnb_4bit_use_double_quant") is not False
            stored_in_bytes = (run.word("bnb_4bit_quant_storage") or "uint8") in BYTES
            by = run.word("quant_method") or "bnb"
            set_quantisation(run, key, str(bits), nested=nested, by=by, stored_in_bytes=stored_in_bytes)
        if method in ("lora", "longlora", "adalora"):
            regex = run.text("target_regex")
            if regex:
                run.data = {**run.data, "target_modules": regex}
            elif "target_modules" not in run.data:
                run.data = {**run.data, "target_modules": "all-linear"}
            set_adapters(run, rank="lora_rank", targets="target_modules", default_rank=8, quantised=bool(bits), dropout=0.05)
            if method != "lora":
                run.leave_out(key, UNKNOWN, f"{method} is planned as LoRA")
            if run.word("tuner_backend") == "unsloth":
                run.leave_out("tuner_backend", LESS, "Unsloth's kernels keep fewer tensors")
            return
        run.set("method", method)
        if method == "full":
            parts = frozen_parts(run, vision="freeze_vit", projector="freeze_aligner", language="freeze_llm")
            run.set("freeze_rule", FreezeRule("freeze_vit", parts, prefixes=tuple(run.texts("freeze_parameters"))))
        else:
            run.leave_out(key, UNKNOWN, f"{method} is not modelled; all parameters are counted as trained")


_NAMED = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


def named_ds_config(name: str) -> dict[str, Any]:
    """The ds_config that ms-swift has under a name."""
    stage, _, offload = name.removeprefix("zero").partition("_")
    device = {"device": "cpu" if offload else "none", "pin_memory": True}
    zero: dict[str, Any] = {"stage": int(stage), "overlap_comm": False, "contiguous_gradients": True}
    if stage == "3":
        zero |= {
            "offload_optimizer": device,
            "offload_param": device,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    else:
        zero |= {
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
        }
        if stage != "0":
            zero["offload_optimizer"] = device
    return {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
