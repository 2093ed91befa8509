"""open-instruct: arguments of ``finetune.py``, ``dpo_tune_cache.py`` and ``grpo_fast.py``, as YAML or command lines.

Source: open-instruct of August 2026, ``open_instruct/finetune.py`` (FlatArguments, main), ``dpo_utils.py``, ``model_utils.py``.
"""

from __future__ import annotations

import re
from typing import Any

from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.adapters import set_attention, set_dropout
from zeroplan.interop.programs.builder import Builder
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.known import arguments_of, only_of, telling_of_others
from zeroplan.interop.programs.machine import take_machine
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.trainer import refuse_cpu
from zeroplan.interop.setups import Setup

MORE, LESS, UNKNOWN = Effect.MORE, Effect.LESS, Effect.UNKNOWN
_SCRIPT = re.compile(r"open_instruct/(finetune|dpo\w*|grpo\w*|reward_modeling|ppo\w*|online_dpo\w*)\.py$")
_ONLY = ("dataset_mixer_list", "with_tracking", "checkpointing_steps", "gradient_checkpointing", "use_flash_attn", "hf_entity")
_NOT_MODELLED = {
    "packing": (LESS, "samples are laid end to end without padding"),
    "use_8bit_optimizer": (LESS, "8-bit states are counted in full width"),
    "load_balancing_loss": (MORE, "logits of the routers are kept for a second loss"),
    "sequence_parallel_size": (UNKNOWN, "ranks share each sequence"),
    "cpu_offload": (LESS, "shards on the host"),
    "tensor_parallel_degree": (UNKNOWN, "ranks share each matrix"),
    "context_parallel_degree": (UNKNOWN, "ranks share each sequence"),
}


#: Keys whose values speak of a task, and its words.
_NAMES = ("output_dir", "exp_name", "run_name", "dataset_name", "dataset_mixer", "dataset_mixer_list")
_OTHER_TASKS = re.compile(r"(?<![a-z])(dpo|grpo|ppo|reward|rm)(?![a-z])")


class OpenInstruct(Program):
    """Weights in bf16, flash attention, AdamW; full fine-tuning unless ``use_lora``."""

    name = "open-instruct"
    title = "open-instruct"
    version = "of August 2026"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return the name of one of open-instruct's scripts, or the arguments that only it has."""
        if document.command is not None:
            found = _SCRIPT.search(document.command.program)
            return (document.command.program,) if found else ()
        if telling_of_others(document.data, self.name):
            return ()
        own = only_of(self.name) | {"dataset_mixer_list", "with_tracking", "checkpointing_steps", "use_flash_attn"}
        found_keys = document.has(*sorted(own - {"beta"}))
        # Other scripts have a use_lora, too, beside arguments of the Trainer that open-instruct does not have.
        strange = document.has(*sorted(arguments_of("hf-trainer") - arguments_of(self.name)))
        return found_keys if "model_name_or_path" in document.data and len(found_keys) > len(strange) else ()

    def read(self, document: Document) -> Setup:
        """Read the run."""
        run = Builder(document, self.name, self.label)
        refuse_cpu(run)
        task = _task(run)
        run.take_model("model_name_or_path")
        run.count("micro_batch", "per_device_train_batch_size", default=1 if task == "grpo" else 8)
        run.count("grad_accum", "gradient_accumulation_steps", default=1)
        _length(run, task)
        run.assume("weights in bf16 and flash attention", model_dtype="bf16", dtype="bf16", attn="flash")
        if run.flag("use_flash_attn") is False:
            run.set("attn", "sdpa", "use_flash_attn")
        fused = run.flag("fused_optimizer") is not False and task == "sft"
        run.set("optimizer", "adamw")
        run.set("optimizer_kind", "fused" if fused else "foreach")
        again = run.flag("gradient_checkpointing")
        if again is None:
            run.assume("gradient_checkpointing false", gradient_checkpointing=False)
        else:
            run.set("gradient_checkpointing", again, "gradient_checkpointing")
        _adapters(run)
        run.leave_out_flags(_NOT_MODELLED)
        set_attention(run, "attn_implementation")
        stage = run.number("deepspeed_stage", least=0)
        if stage is not None or task == "grpo":
            run.set("engine", "deepspeed", "deepspeed_stage" if stage is not None else "")
            run.set(
                "ds_config",
                {
                    "zero_optimization": {"stage": stage or 0, **_offloads(run)},
                    "train_micro_batch_size_per_gpu": "auto",
                    "bf16": {"enabled": True},
                },
            )
        if run.fields.get("engine") is None and document.command is None:
            run.assume("no engine: the launcher decides it, so give its file as well")
        take_machine(run)
        return run.setup("open-instruct")


def _task(run: Builder) -> str:
    """Set the task, which the script's name says, or else keys that one script alone has; return it."""
    document = run.document
    program = document.command.program if document.command else ""
    script = _SCRIPT.search(program)
    word = script[1] if script else "grpo" if document.has("num_samples_per_prompt_rollout") else "finetune"
    task = "dpo" if "dpo" in word or (script is None and document.has("dpo_beta", "beta", "dpo_loss_type")) else word
    task = {"finetune": "sft"}.get(task, "grpo" if task.startswith("grpo") else "reward" if "reward" in task else task)
    run.set("task", task)
    if script is None and task == "sft" and (named := _named_task(run)):
        task = run.set("task", named)
    if script is None:
        run.assume("finetune.py, since no key of another script is set" if task == "sft" else f"the script of {task}")
    if task != "sft":
        run.leave_out(f"task {task}", MORE, "pairs of samples, further models or generation beside the trained model")
    return task


def _length(run: Builder, task: str) -> None:
    """Set the longest sample."""
    if run.number("max_seq_length") is not None:
        run.count("seq_len", "max_seq_length")
    elif task == "grpo":
        prompt, answer = run.number("max_prompt_token_length") or 256, run.number("response_length") or 256
        packed = run.number("pack_length")
        run.set("seq_len", packed or prompt + answer, "pack_length" if packed else "response_length")
    else:
        run.leave_out("max_seq_length", UNKNOWN, "nothing bounds the length of a sample; give --seq-len")


def _adapters(run: Builder) -> None:
    """Set LoRA and its rank, where it is on."""
    if run.flag("use_lora") or run.flag("use_qlora"):
        quantised = bool(run.flag("use_qlora"))
        run.set("method", "qlora" if quantised else "lora", "use_lora")
        run.count("lora_rank", "lora_rank", default=64)
        set_dropout(run, 0.1)
        run.set("lora_targets", ("q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj"))
        if quantised:
            run.leave_out("use_qlora", UNKNOWN, "base weights in NF4 are counted in 16 bits")
    else:
        run.set("method", "full")


def _named_task(run: Builder) -> str:
    """The task of which a recipe's name, folder, data or output speak; empty for finetune.py's."""
    path = [] if run.document.folder is None else [run.document.folder.name, run.document.name.rpartition("/")[2]]
    said = " ".join([*path, *(str(run.data.get(key, ""))[:500] for key in _NAMES)]).lower()
    word = _OTHER_TASKS.search(said)
    return "" if word is None else "reward" if word[1] in ("rm", "reward") else word[1]


def _offloads(run: Builder) -> dict[str, Any]:
    """Return what the switches put on the host. Source: open_instruct/utils.py (``get_train_ds_config``)."""
    sections = ("offload_optimizer", "offload_param")
    return {section: {"device": "cpu", "pin_memory": True} for section in sections if run.flag(f"deepspeed_{section}")}
