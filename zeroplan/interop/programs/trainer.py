"""The HF Trainer: what its TrainingArguments do, for itself and for the programs that build on it.

Source: transformers 5.17, ``training_args.py`` (defaults, ``_process_fsdp_args``) and ``trainer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import read_document
from zeroplan.core.unmodelled import Effect
from zeroplan.core.versions import TRANSFORMERS
from zeroplan.interop.programs.adapters import (
    set_attention,
    set_optimizer,
    set_script_adapters,
    set_weights_dtype,
)
from zeroplan.interop.programs.builder import Builder, Keys
from zeroplan.interop.programs.document import Document, find_named_file
from zeroplan.interop.programs.examples import is_example, read_example, read_script_name
from zeroplan.interop.programs.known import arguments_of, names_in, telling_of_others
from zeroplan.interop.programs.machine import take_machine
from zeroplan.interop.programs.program import Program
from zeroplan.interop.setups import Setup
from zeroplan.techniques.label_smoothing import LabelSmoothingTechnique

#: The Trainer's optimizer since torch 2.8; before, it was ``adamw_torch``, whose loops need a temporary.
DEFAULT_OPTIMIZER = "adamw_torch_fused"
#: Arguments by whose names ds_configs and accelerate's files have keys, too.
_SHARED = frozenset(
    (
        "use_cpu",
        "debug",
        "bf16",
        "fp16",
        "gradient_accumulation_steps",
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "parallelism_config",
    )
)
#: Arguments of which every file for the Trainer has one.
_CORE = (
    *("per_device_train_batch_size", "per_gpu_train_batch_size", "gradient_accumulation_steps", "learning_rate", "max_steps"),
    *("num_train_epochs", "output_dir", "optim", "bf16", "fp16", "deepspeed", "fsdp", "gradient_checkpointing"),
)
#: A command line with this many of its arguments is a script's on the Trainer, if it is no other program's.
_ENOUGH = 2
#: Where scripts that extend TrainingArguments keep the length of a sample, in the order in which they are asked.
_LENGTHS = ("max_seq_length", "model_max_length", "max_length", "block_size", "cutoff_len", "seq_length", "max_source_length")
#: Where they name the model.
_MODELS = ("model_name_or_path", "model_name", "model_id", "model_path", "base_model")
#: Tasks by the names of scripts.
_SCRIPT_TASK = re.compile(r"(?<![a-z])(dpo|orpo|kto|ppo|grpo|rloo|cpo|simpo|reward|rm|gkd|distill\w*)(?![a-z])")
_TASK_NAMES = {"rm": "reward", "simpo": "cpo", "distill": "distillation"}
#: Scripts and models of two sides.
_SEQ2SEQ_SCRIPT = re.compile(r"run_(summarization|translation)")
_SEQ2SEQ_MODEL = re.compile(r"(^|[/_-])(m?t5|flan-t5|umt5|byt5|m?bart|pegasus|marian|opus-mt|m2m|nllb|led)([/_.-]|$)")

#: Arguments of transformers' example scripts (``examples/pytorch``, ModelArguments and DataTrainingArguments), and names that
#: scripts give to data and to the scale of adapters: none moves memory.
EXAMPLES = frozenset(
    (
        *("model_name_or_path", "model_type", "config_name", "config_overrides", "tokenizer_name", "cache_dir", "token"),
        *("use_fast_tokenizer", "model_revision", "trust_remote_code", "torch_dtype", "dtype", "low_cpu_mem_usage"),
        *("dataset_name", "dataset_config_name", "train_file", "validation_file", "test_file", "max_train_samples"),
        *("max_eval_samples", "max_predict_samples", "streaming", "block_size", "max_seq_length", "overwrite_cache"),
        *("validation_split_percentage", "preprocessing_num_workers", "keep_linebreaks", "task_name", "line_by_line"),
        *("pad_to_max_length", "max_source_length", "max_target_length", "source_prefix", "source_lang", "target_lang"),
        *("lora_alpha", "data_path", "train_file_dir", "validation_file_dir", "train_data_path", "eval_data_path"),
    )
)

#: The wrap policy whose units are blocks: the Trainer's default, where accelerate's own is none.
_WRAPS = "TRANSFORMER_BASED_WRAP"
#: Keys that tell of saving between steps.
_SAVES = ("save_strategy", "save_steps", "save_total_limit", "save_only_model")
#: What commands do beside training, or in its place.
_OTHER_DEEDS = ("do_predict", "do_infer", "export_dir", "merge_lora_and_save")
_OTHER_SCRIPT = re.compile(r"(^|_)(export|merge|infer|inference|predict|generate|analy[sz]e|preprocess|tokenize)(_|\.py$)")
_TRAINING_SCRIPT = re.compile(r"train|tune|sft|run_")
#: What is said where FSDP 2 stands in.
FSDP_1 = "FSDP 1 is not modelled here; the figures are those of FSDP 2"
#: What is said of transformers' own tensor parallelism.
TRANSFORMERS_TP = "transformers' plan leaves the embedding whole and gathers logits; --tp splits both, as torchtitan does"
MORE, LESS, UNKNOWN = Effect.MORE, Effect.LESS, Effect.UNKNOWN
#: Arguments that move memory and that no field of a Setup holds.
_NOT_MODELLED: dict[str, tuple[Effect, str]] = {
    "auto_find_batch_size": (LESS, "lowers the batch when memory runs out"),
    "parallelism_config": (UNKNOWN, "tensor and context parallelism are not planned"),
    "optim_target_modules": (UNKNOWN, "which layers a low-rank optimizer projects"),
    "torch_empty_cache_steps": (LESS, "cached blocks are given back every so many steps"),
    "use_cache": (MORE, "keys and values of every layer are cached in the forward, too"),
    "ddp_bucket_cap_mb": (UNKNOWN, "gradients' buckets of another size; DDP's own are counted"),
}
#: FSDP's options that change which parameters are gathered together, or how early; names without ``fsdp_``.
_FSDP_OPTIONS: dict[str, tuple[Effect, str]] = {
    "forward_prefetch": (MORE, "the next unit is gathered before it is needed in the forward"),
    "activation_checkpointing_offload": (LESS, "checkpoints wait on the host"),
    "activation_cpu_offload": (LESS, "activations wait on the host"),
    "cpu_offload_pin_memory": (Effect.NONE, "where the host's shards are"),
    "mixed_precision_policy": (UNKNOWN, "dtypes of parameters and reductions by the file's own policy"),
    "ignored_modules": (MORE, "modules that are not sharded"),
}


#: Those that are read, or move nothing that a plan holds.
_FSDP_READ = frozenset(
    (
        *("version", "reshard_after_forward", "sharding_strategy", "auto_wrap_policy", "min_num_params", "backward_prefetch"),
        *("transformer_layer_cls_to_wrap", "cpu_ram_efficient_loading", "offload_params", "cpu_offload", "state_dict_type"),
        *("sync_module_states", "use_orig_params", "activation_checkpointing", "limit_all_gathers", "final_state_dict_type"),
        *("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "save_policy", "fsdp_version", "mixed_precision"),
    )
)


@dataclass(frozen=True, slots=True)
class TrainerDefaults:
    """A program's defaults where they differ from the Trainer's.

    Attributes:
        micro_batch: ``per_device_train_batch_size``.
        checkpointing: ``gradient_checkpointing``.
        bf16: used where neither ``bf16`` nor ``fp16`` is given.
        optimizer: ``optim``.
    """

    micro_batch: int = 8
    checkpointing: bool = False
    bf16: bool = False
    optimizer: str = DEFAULT_OPTIMIZER


#: The Trainer's own.
TRAINER = TrainerDefaults()


def read_trainer(run: Builder, defaults: TrainerDefaults = TRAINER) -> None:
    """Read the arguments that every program on the Trainer has.

    Raises:
        BadInput: a run on the CPU, both 16-bit dtypes, values of wrong types, or a file that is not there.
    """
    refuse_cpu(run, "use_cpu", "no_cuda")
    _refuse_no_training(run)
    run.set("detached_loss", True)
    run.set("moved", True)
    run.count("micro_batch", "per_device_train_batch_size", "per_gpu_train_batch_size", default=defaults.micro_batch)
    run.count("grad_accum", "gradient_accumulation_steps", default=1)
    set_precision(run, default="bf16" if defaults.bf16 else "fp32")
    set_optimizer(run, "optim", default=defaults.optimizer)
    again = run.flag("gradient_checkpointing")
    if again is None:
        run.assume(
            f"gradient_checkpointing {str(defaults.checkpointing).lower()}", gradient_checkpointing=defaults.checkpointing
        )
    else:
        run.set("gradient_checkpointing", again, "gradient_checkpointing")
    _reentrance(run)
    run.leave_out_flags(_NOT_MODELLED)
    if run.amount("label_smoothing_factor") and run.program not in LabelSmoothingTechnique.keys:
        run.leave_out("label_smoothing_factor", UNKNOWN, "where the program takes it from the Trainer, whole logits are kept")
    set_compile(run)
    _evaluation(run)
    set_saving(run)
    # DeepSpeed's own arguments are a switch and a path.
    key = "deepspeed_config" if run.data.get("deepspeed") is True and "deepspeed_config" in run.data else "deepspeed"
    shards = run.value("fsdp") not in (None, False, "", [])
    if run.ds_config(key) is not None:
        if shards:
            raise run.bad("fsdp", "stands beside deepspeed, and the Trainer takes one of the two", "remove one")
        run.set("engine", "deepspeed", key)
        run.set("zero_init", True)  # the arguments stand before the model is loaded
    elif shards:
        _fsdp(run)
    take_machine(run)


def refuse_cpu(run: Builder, *switches: str) -> None:
    """Refuse a run without GPUs."""
    for key in switches:
        if run.flag(key):
            raise BadInput("asks for training on the CPU", where=f"{run.name}: {key}", remedy="plans are of runs on GPUs")


def set_precision(run: Builder, *, default: str) -> None:
    """``bf16`` and ``fp16`` as transformers has them: it refuses both. Raises BadInput: both are true."""
    bf16, fp16 = run.flag("bf16"), run.flag("fp16")
    if bf16 and fp16:
        raise BadInput("bf16 and fp16 are both true", where=run.name, remedy="switch one of them off")
    if bf16 or fp16:
        run.set("dtype", "bf16" if bf16 else "fp16", "bf16" if bf16 else "fp16")
    elif bf16 is False or fp16 is False:
        run.set("dtype", "fp32" if bf16 is False or default == "fp32" else default, "bf16" if bf16 is False else "fp16")
    else:
        run.assume(f"{default} arithmetic" if default == "fp32" else f"{default} true", dtype=default)


def _refuse_no_training(run: Builder) -> None:
    """Refuse a run that predicts, merges or evaluates alone: ``do_train`` is off, or another deed is asked for without it."""
    trains = run.flag("do_train") if isinstance(run.data.get("do_train"), bool | str) else None
    others = [key for key in _OTHER_DEEDS if run.on(key)]
    program = run.document.command.program.rpartition("/")[2].lower() if run.document.command else ""
    if _OTHER_SCRIPT.search(program) and not _TRAINING_SCRIPT.search(program):
        others.append(program)
    switched_off = trains is False and run.document.command is not None  # arguments that were written out all say false
    if switched_off or (others and not trains):
        key = "do_train" if switched_off else others[0]
        raise BadInput(
            "does not train: it predicts, merges or evaluates", where=f"{run.name}: {key}", remedy="give a run that trains"
        )


def _evaluation(run: Builder) -> None:
    """Evaluation between steps. ``evaluate`` keeps the loss alone where no ``compute_metrics`` asks for more.

    Source: transformers 5.17, ``trainer.py`` (``evaluate``, ``evaluation_loop``); ``trainer_seq2seq.py`` (``prediction_step``).
    """
    strategy = run.word("eval_strategy") or run.word("evaluation_strategy") or "no"
    batch = run.number("per_device_eval_batch_size") or 8
    if strategy == "no" and not run.flag("do_eval"):
        return
    key = "per_device_eval_batch_size" if "per_device_eval_batch_size" in run.data else "eval_strategy"
    run.set("eval_batch", batch, key)
    if not run.flag("prediction_loss_only"):
        run.assume("evaluation keeps no logits, since no key tells of compute_metrics")
    if run.flag("predict_with_generate"):
        run.leave_out("predict_with_generate", MORE, "generation and its cache of keys and values")


def set_compile(run: Builder) -> None:
    """The model compiled as a whole, where a key switches that on: the backend and the mode do, too.

    Source: transformers 5.17, ``training_args.py`` (``TrainingArguments.__post_init__``).
    """
    keys = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    asked = [key for key in keys if run.on(key)]
    if asked:
        run.take_compile("model", asked[0], backend=run.word(keys[1]), mode=run.word(keys[2]))


def set_saving(run: Builder, *more: str) -> None:
    """Saving between steps, where one of the Trainer's keys or of `more` tells of it. The Trainer saves every 500 steps if none
    does; that is said and not planned.

    Source: transformers 5.17, ``training_args.py`` (``save_strategy``), ``trainer.py`` (``_save_checkpoint``).
    """
    asked = [key for key in (*_SAVES, *more) if run.value(key) is not None]
    if not asked:
        run.assume("no saves (by default it saves: --save plans that)")
        return
    if run.word("save_strategy") in ("no", "never"):
        return
    run.set("saves", True, asked[0])
    run.set("saver", "trainer")
    run.set("save_only_model", bool(run.flag("save_only_model")))


def _fsdp(run: Builder) -> None:
    """Set FSDP by the arguments: version 2 unless ``fsdp_config`` says 1. Source: ``TrainingArguments._process_fsdp_args``."""
    value = run.value("fsdp_config")
    options: Mapping[str, Any]
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        path = find_named_file(value, run.document, "fsdp_config")
        options = read_document(str(path))
    else:
        options = run.block("fsdp_config").data
    plain = Keys({key.removeprefix("fsdp_"): item for key, item in options.items()}, f"{run.name}: fsdp_config")
    words = run.value("fsdp")
    said = words.split() if isinstance(words, str) else words if isinstance(words, list) else []
    said = [str(word).lower() for word in said]
    if plain.flag("xla"):
        run.leave_out("fsdp_config.xla", UNKNOWN, "runs on XLA devices")
    set_fsdp(
        run,
        "fsdp",
        version=int(plain.word("version") or 2),
        reshard=plain.word("reshard_after_forward") or ("false" if "shard_grad_op" in said else "true"),
        offload="offload" in said or bool(plain.flag("cpu_offload") or plain.flag("offload_params")),
        hybrid=any("hybrid" in word for word in said),
        checkpointing=plain.flag("activation_checkpointing"),
        options=plain,
        wraps=_WRAPS,
        state_dict="full",
    )
    if run.block("accelerator_config").block("gradient_accumulation_kwargs").flag("sync_each_batch"):
        run.set("sync_each", True, "accelerator_config")  # Trainer._run_epoch: no_sync is not called


def _reentrance(run: Builder) -> None:
    """Set the way of checkpointing where the file says it: the Trainer's own key, or that of peft's and TRL's scripts."""
    for keys in (run.block("gradient_checkpointing_kwargs"), run):
        said = keys.flag("use_reentrant")
        if said is not None:
            run.set("reentrant", said, "use_reentrant")
            return


def set_fsdp(
    run: Builder,
    key: str,
    *,
    version: int,
    reshard: str,
    offload: bool,
    hybrid: bool,
    checkpointing: bool | None,
    options: Keys | None = None,
    wraps: str = "",
    state_dict: str = "",
) -> None:
    """Set FSDP as the engine.

    Args:
        key: the key that chose FSDP.
        reshard: whether parameters are freed after the forward, or FSDP 1's name of the sharding strategy.
        offload: parameters, gradients and states are on the host.
        hybrid: shards stay within a node.
        checkpointing: of FSDP's own options.
        options: FSDP's further options, by names without ``fsdp_``; None where the program has none.
        wraps: the wrap policy where the options name none.
        state_dict: the form of what is saved where the options name none; empty for accelerate's own default.
    """
    if options is not None:
        _fsdp_options(run, key, options, wraps, version)
        state_dict = (options.word("state_dict_type") or state_dict).removesuffix("_state_dict")
    if state_dict in ("sharded", "full"):
        run.set("state_dict", state_dict, key)
    else:
        run.set("state_dict", "full" if version == 1 else "sharded")
    if state_dict == "local":
        run.leave_out(f"{key}: state_dict_type", MORE, "flat shards as they are; sharded tensors are counted")
    run.set("engine", "fsdp2", key)
    keeps = reshard in ("false", "no", "shard_grad_op", "_hybrid_shard_zero2", "hybrid_shard_zero2")
    whole = reshard == "no_shard" and version == 1 and not offload
    run.set("stage", 0 if whole else 2 if keeps else 3, key)
    if offload:
        run.set("offload_optimizer", "cpu", key)
        run.set("offload_param", "cpu", key)
    if version == 2:
        run.set("accelerate_units", True)
        run.set("reduce_dtype", "products")  # accelerate 1.15, utils/dataclasses.py, set_mixed_precision
    if version == 1:
        run.set("fsdp_version", 1)
        run.leave_out(key, UNKNOWN, FSDP_1)
    if hybrid or "hybrid" in reshard:
        run.leave_out(f"{key}: hybrid", MORE, "shards within a node and replicas between nodes are not planned")
    if reshard == "no_shard" and not whole:
        run.leave_out(f"{key}: no_shard", MORE, "nothing is sharded; the figures are those of shards")
    if checkpointing:
        run.set("gradient_checkpointing", True, key)
        run.assumed = [clause for clause in run.assumed if not clause.startswith("gradient_checkpointing ")]


def _fsdp_options(run: Builder, key: str, options: Keys, wraps: str, version: int) -> None:
    """List the options that no plan holds. Source: accelerate 1.15, ``utils/dataclasses.py`` (``set_auto_wrap_policy``)."""
    policy = (options.word("auto_wrap_policy") or wraps).upper()
    if policy == "SIZE_BASED_WRAP" and options.amount("min_num_params"):
        run.leave_out(f"{key}: auto_wrap_policy", UNKNOWN, "units by their number of parameters; blocks are counted as units")
    elif policy == "NO_WRAP" and version == 1:
        run.set("one_unit", True)
    elif policy and policy != _WRAPS:
        run.leave_out(
            f"{key}: auto_wrap_policy", MORE, "without a wrap policy all parameters are one unit, gathered as a whole"
        )
    if (prefetch := options.word("backward_prefetch")) and "no_prefetch" in prefetch:
        run.leave_out(f"{key}: backward_prefetch", LESS, "units are not gathered ahead in the backward")
    for option, (effect, says) in _FSDP_OPTIONS.items():
        if options.on(option):
            run.leave_out(f"{key}: {option}", effect, says)
    for option in options.data:
        if option not in _FSDP_READ and option not in _FSDP_OPTIONS and not option.startswith("_") and options.on(option):
            run.leave_out(f"{key}: {option}"[:80], UNKNOWN, "no option of FSDP that is known here")


class HfTrainer(Program):
    """TrainingArguments as JSON or YAML, or the command line of a script that builds on the Trainer."""

    name = "hf-trainer"
    title = "HF Trainer"
    version = TRANSFORMERS

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return the script's name, or arguments without the model: programs on the Trainer name theirs in the same file."""
        known = document.has(*sorted(arguments_of(self.name) - _SHARED))
        if document.command is not None:
            return known if len(known) >= _ENOUGH and not document.has("num_attention_heads") else ()
        if not document.has(*_CORE):
            return ()
        mostly = 2 * len(document.has(*arguments_of(self.name))) >= len(document.data)
        return known if mostly and "model_name_or_path" not in document.data else ()

    def could_own(self, document: Document) -> bool:
        """Return whether it is a script's file: mostly arguments of the Trainer and of transformers' examples."""
        trainers = document.has(*sorted(arguments_of(self.name) - _SHARED))
        known = document.has(*sorted(arguments_of(self.name) | EXAMPLES))
        if len(known) == len(document.data):
            return bool(document.has("model_name_or_path", *arguments_of(self.name)))
        other = bool(document.has(*sorted(names_in("trl") - arguments_of(self.name) - EXAMPLES)))
        other &= not telling_of_others(document.data, self.name, "trl")
        other |= all(key in arguments_of(self.name, "trl") for key in document.data)
        return len(trainers) >= _ENOUGH and 2 * len(known) >= len(document.data) and not other

    def starts_own(self, document: Document) -> bool:
        """Whether a command starts one of transformers' own examples; the Trainer is started by scripts."""
        return document.command is not None and is_example(document.command.program)

    def read(self, document: Document) -> Setup:
        """Read the run: DeepSpeed with a ds_config, FSDP where asked for, else DDP."""
        run = Builder(document, self.name, self.label)
        run.casts = document.command is not None
        read_trainer(run)
        if document.command is not None and run.on("do_eval") and "do_train" not in run.data:
            run.assume("it trains, though do_train is not set")
        if run.fields.get("engine") is None:
            run.set("engine", "ddp")
        run.take_model(*_MODELS)
        _script_task(run)
        if document.script is not None:
            set_attention(run, "attn_implementation")
        for key in _LENGTHS:
            if run.number(key) is None:
                continue
            if key == "max_source_length" and run.number("max_target_length") and not _two_sided(run):
                run.open["seq_len"] = "the script decides how source and target make a sample; give --seq-len"
            else:
                run.count("seq_len", key)
            break
        read_example(run)
        _two_lengths(run)
        set_script_adapters(run)
        read_script_name(run)
        if "ds_config" not in run.fields or {"dtype", "torch_dtype"} & set(run.data):
            set_weights_dtype(run, default="weights in fp32: the script's from_pretrained decides")
        return run.setup(self.name, known=EXAMPLES)


def _two_sided(run: Builder) -> bool:
    """Whether a script or a model is one for encoder-decoders by its name."""
    command, model = run.document.command, str(run.fields.get("model") or "").lower()
    return bool((command and _SEQ2SEQ_SCRIPT.search(command.program)) or _SEQ2SEQ_MODEL.search(model))


def _two_lengths(run: Builder) -> None:
    """Set source and target of transformers' scripts for encoder-decoders, with their defaults.

    Source: transformers 5.17, ``examples/pytorch/summarization/run_summarization.py`` and ``translation/run_translation.py``
    (DataTrainingArguments).
    """
    command = run.document.command
    script = _SEQ2SEQ_SCRIPT.search(command.program) if command else None
    if not _two_sided(run):
        return
    source, target = run.number("max_source_length"), run.number("max_target_length")
    if script is None and (source is None or target is None):
        return
    run.set("seq_len", source or 1024, "max_source_length" if source else "")
    run.set("target_len", target or 128, "max_target_length" if target else "")
    if not source or not target:
        run.assume(f"source {source or 1024} and target {target or 128} tokens")
    run.assume("batches as long as their longest samples may be")


def _script_task(run: Builder) -> None:
    """Set the task that the script's name tells, beyond one forward and backward of one model."""
    program = run.document.command.program.rpartition("/")[2].lower() if run.document.command else ""
    said = _SCRIPT_TASK.search(program)
    if said is not None:
        task = _TASK_NAMES.get(said[1], said[1])
        run.set("task", task)
        run.leave_out(f"task {task}", MORE, "pairs of samples, further models or generation beside the trained model")
