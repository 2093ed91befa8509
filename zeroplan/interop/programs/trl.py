"""TRL: recipes of its command line, of the alignment handbook and of open-r1, and command lines of its scripts.

Source: TRL 1.16, ``trainer/*_config.py``, ``trainer/model_config.py``, ``scripts/*.py``, ``trainer/utils.py``.
"""

from __future__ import annotations

import re

from zeroplan.core.errors import BadInput
from zeroplan.core.generation import Colocated, Generation
from zeroplan.core.preferences import PLANNED, PairLoss, passes_of
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.adapters import BYTES, set_adapters, set_attention, set_quantisation, set_weights_dtype
from zeroplan.interop.programs.builder import Builder
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.known import arguments_of, names_in, only_of, telling_of_others
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.trainer import EXAMPLES, TrainerDefaults, read_trainer
from zeroplan.interop.setups import Setup
from zeroplan.techniques.ppo import Ppo

#: Arguments that, of all programs read here, TRL alone has; recipes of older versions and of the handbook among them.
_ONLY = (
    *("use_peft", "lora_task_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant", "lora_modules_to_save"),
    *("dataset_text_field", "dataset_kwargs", "dataset_num_proc", "completion_only_loss", "assistant_only_loss"),
    *("model_init_kwargs", "chat_template_path", "packing_strategy", "precompute_ref_log_probs", "max_prompt_length"),
    *("dataset_train_split", "dataset_test_split", "dataset_mixture", "num_generations", "missing_eos_penalty"),
    *("center_rewards_coefficient", "rpo_alpha", "num_ppo_epochs", "cast_lm_head_to_fp32"),
)
#: Arguments of fms-hf-tuning, whose classes derive from TRL's with defaults of their own (``tuning/config/configs.py``).
_FMS = ("training_data_path", "validation_data_path", "peft_method", "data_formatter_template", "data_config_path")
_SCRIPT = re.compile(r"(^|/)(run_)?(sft|dpo|grpo|kto|orpo|cpo|reward_modeling|reward|rloo|ppo|bco|gkd)(_\w+)?\.py$")
_MODULE = re.compile(r"(^|/)trl[./]scripts[./](sft|dpo|grpo|kto|reward|rloo)(\.py)?$")
_COMMANDS = tuple(f"trl {task}" for task in ("sft", "dpo", "grpo", "kto", "reward", "rloo"))
#: Keys that only one kind of trainer has, in the order in which they decide.
_TASK_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("grpo", ("num_generations", "max_completion_length", "reward_funcs", "epsilon_high", "vllm_mode")),
    ("ppo", ("num_ppo_epochs", "reward_model_path", "missing_eos_penalty", "response_length")),
    ("kto", ("desirable_weight", "undesirable_weight")),
    ("orpo", ("disable_prompt_truncation",)),
    ("cpo", ("simpo_gamma", "cpo_alpha", "gamma_beta_ratio")),
    ("reward", ("center_rewards_coefficient",)),
    ("gkd", ("teacher_model_name_or_path", "lmbda", "seq_kd")),
    ("dpo", ("rpo_alpha", "ld_alpha", "f_divergence_type", "use_weighting", "discopop_tau", "loss_weights")),
)
#: Keys of SFT alone.
_SFT_KEYS = ("packing", "packing_strategy", "completion_only_loss", "assistant_only_loss", "dataset_text_field")
#: Keys of the trainers with a reference model, of which DPO is the commonest.
_REFERENCE_KEYS = ("beta", "precompute_ref_log_probs", "max_prompt_length", "disable_dropout", "sync_ref_model")
#: Losses by the one trainer that has them.
_LOSSES = {
    "dpo": ("sigmoid", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_pair", "discopop"),
    "kto": ("kto", "apo_zero_unpaired"),
    "cpo": ("simpo",),
    "grpo": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo"),
    "sft": ("nll", "dft", "chunked_nll"),
}
#: Values whose words name a task: of a folder's or a run's name nothing is certain, so they only raise the question.
_NAMES = ("output_dir", "hub_model_id", "run_name", "dataset_name", "dataset_mixer", "dataset_mixture")
_WORDS = re.compile(r"(?<![a-z])(sft|dpo|grpo|kto|orpo|cpo|simpo|reward|rm|rloo|ppo|bco|gkd)(?![a-z])")
_SAME = {"rm": "reward", "simpo": "cpo"}
#: What each task holds beside one forward and backward of one model on micro batch × length.
_TASKS: dict[str, tuple[Effect, str]] = {
    "ppo": (Effect.MORE, "generation, a value model, a reward model and a reference model"),
    "bco": (Effect.MORE, "a reference model beside the trained one"),
    "gkd": (Effect.MORE, "a teacher beside the trained model, and generation"),
}
_GATHERS = "TRL's head gathers its sharded weight by itself"
#: Tasks whose samples are bounded by ``max_length``, 1,024 by default since TRL 0.14; the rest add prompt and completion.
_COMPLETION_TASKS = ("grpo", "rloo", "ppo")
#: Those of them that generate by the trained model alone, and the tokens that they generate by default.
_GENERATING = ("grpo", "rloo")
_ANSWER = 512
#: Tokens of a response, and samples that are generated at once, by default in PPO.
_RESPONSE, _ROLLOUT = 53, 64
#: Of a card that a colocated vLLM takes by default.
_VLLM = 0.3
#: Keys of generation with another cache, or beside other models.
_OTHER_CACHES = {
    "cache_implementation": (Effect.UNKNOWN, "a cache of another kind"),
    "use_transformers_paged": (Effect.UNKNOWN, "a cache in pages"),
    "use_transformers_continuous_batching": (Effect.UNKNOWN, "a cache in pages"),
    "reward_model_name_or_path": (Effect.MORE, "a reward model beside the trained one"),
    "generation_kwargs": (Effect.UNKNOWN, "arguments of generate"),
}
_NOT_MODELLED = {
    "activation_offloading": (Effect.LESS, "activations wait on the host between forward and backward"),
    "padding_free": (Effect.LESS, "samples are laid end to end without padding"),
    "lora_target_parameters": (Effect.MORE, "adapters on parameters that are no layers"),
    "cast_lm_head_to_fp32": (Effect.MORE, "an fp32 head"),
    "use_unsloth": (Effect.LESS, "Unsloth's kernels keep fewer tensors"),
    "sync_ref_model": (Effect.NONE, "the reference model is averaged in place"),
}


class Trl(Program):
    """SFTConfig, DPOConfig, GRPOConfig and the others, beside ModelConfig and ScriptArguments."""

    name = "trl"
    title = "TRL"
    version = "1.16"
    base = "hf-trainer"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return the arguments that only TRL has, or its command."""
        command = document.command
        if command is not None:
            started = (command.program,) if self.starts_own(document) else ()
            return started or ((command.program,) if _SCRIPT.search(command.program) and self._own(document) else ())
        return self._own(document) if "base_model" not in document.data else ()

    def starts_own(self, document: Document) -> bool:
        """Whether a command is TRL's, or starts one of its modules."""
        command = document.command
        return command is not None and bool(document.starts(*_COMMANDS) or _MODULE.search(command.program))

    def _own(self, document: Document) -> tuple[str, ...]:
        if telling_of_others(document.data, "hf-trainer", "trl"):
            return ()
        if "model_name_or_path" not in document.data:
            return document.has(*_ONLY)
        return document.has(*sorted(only_of(self.name) | set(_ONLY)))

    def could_own(self, document: Document) -> bool:
        """Return whether the document holds a model and arguments of the Trainer, all of them TRL's."""
        if telling_of_others(document.data, "hf-trainer", "trl"):
            return False
        known = document.has(*arguments_of("hf-trainer", "trl"))
        own = document.has(*(names_in("trl") - arguments_of("hf-trainer") - EXAMPLES))
        mostly = len(known) == len(document.data) or (len(own) > 1 and 2 * len(known) >= len(document.data))
        return "model_name_or_path" in document.data and mostly

    def read(self, document: Document) -> Setup:
        """Read the run: full fine-tuning unless ``use_peft``."""
        run = Builder(document, self.name, self.label)
        task = _task(run)
        run.set("task", task)
        read_trainer(run, TrainerDefaults(checkpointing=True, bf16=True))
        if run.fields.get("engine") is None:
            run.set("engine", "ddp")
        run.take_model("model_name_or_path")
        _length(run, task)
        set_attention(run, "attn_implementation")
        set_weights_dtype(run, default="dtype float32")
        quantised = next((key for key in ("load_in_4bit", "load_in_8bit") if run.flag(key)), None)
        if run.flag("use_peft"):
            set_adapters(
                run,
                rank="lora_r",
                targets="lora_target_modules",
                default_rank=16,
                quantised=quantised is not None,
                everywhere=False,
                dropout=0.05,
            )
            if quantised is not None:
                bits = 4 if quantised == "load_in_4bit" else 8
                set_quantisation(
                    run,
                    quantised,
                    bits,
                    nested=bool(run.flag("use_bnb_nested_quant")),
                    stored_in_bytes=(run.word("bnb_4bit_quant_storage") or "uint8") in BYTES,
                )
                run.set("adapter_dtype", "bf16")  # as the paper on QLoRA has it; in every trainer's __init__
        else:
            if quantised:
                run.leave_out(quantised, Effect.UNKNOWN, "quantised without adapters")
            run.set("method", "full")
            if "use_peft" not in run.data:
                run.assume("full fine-tuning, since use_peft is not set")
        run.leave_out_flags(_NOT_MODELLED)
        if run.flag("packing") and run.word("packing_strategy") != "wrapped" and run.fields.get("attn") != "flash":
            run.leave_out("packing", Effect.MORE, "packed samples are one row, whose mask grows with the square of its length")
        if task in PLANNED:
            _preference(run, task)
        elif task in _GENERATING or task in _TASKS:
            if run.amount("beta"):
                run.set("reference", "base" if run.fields.get("lora_rank") is not None else "model")
            if task in _GENERATING:
                _generation(run)
            elif task == "ppo":
                _ppo(run)
            else:
                run.leave_out(f"task {task}", *_TASKS[task])
        elif not run.amount("label_smoothing_factor"):
            run.set("chunked_head", True)  # of every loss_type; label smoothing takes all logits
            if run.data.get("fsdp"):
                run.leave_out("fsdp", Effect.UNKNOWN, _GATHERS)
        if own := document.has(*_FMS):
            run.leave_out(
                own[0], Effect.UNKNOWN, "fms-hf-tuning's own classes decide what the file does not: defaults are not known"
            )
        return run.setup("hf-trainer", "trl")


def _generation(run: Builder) -> None:
    """Set what transformers generates before each step; leave out what vLLM takes of each GPU, and other caches and models."""
    if run.flag("use_vllm"):
        if (run.word("vllm_mode") or "colocate") == "colocate":
            share = run.amount("vllm_gpu_memory_utilization")
            if share is not None and not 0 < share <= 1:
                raise run.bad("vllm_gpu_memory_utilization", "is no share of a card", "write 0.3")
            sleeps = bool(run.flag("vllm_enable_sleep_mode"))
            run.set("colocated", Colocated(_VLLM if share is None else share, sleeps), "use_vllm")
        return
    run.leave_out_flags(_OTHER_CACHES)
    if run.flag("ds3_gather_for_generation") is False:
        run.leave_out("ds3_gather_for_generation", Effect.UNKNOWN, "each token gathers layer after layer")
    length, answer = run.fields["seq_len"], run.number("max_completion_length") or _ANSWER
    steps, whole = run.number("steps_per_generation"), run.number("generation_batch_size")
    run.set("generation", Generation(length - answer, answer, steps, None if steps else whole))


def _ppo(run: Builder) -> None:
    """Set PPO's models, which TRL's own loop never checkpoints: ``gradient_checkpointing`` reaches none of them.

    Source: TRL 1.8, ``experimental/ppo/ppo_config.py``, ``examples/scripts/ppo/ppo.py``.
    """
    run.leave_out("task ppo", *_TASKS["ppo"])
    answer = run.number("response_length") or _RESPONSE
    run.set("gradient_checkpointing", False)
    run.set("detached_loss", True)
    run.set("eval_batch", None)
    run.assumed = [one for one in run.assumed if not one.startswith(("gradient_checkpointing", "evaluation keeps"))]
    if run.value("sft_model_path") is not None:
        run.take_model("sft_model_path")
    rollout = run.number("local_rollout_forward_batch_size") or _ROLLOUT
    run.set("ppo", Ppo(run.text("reward_model_path"), run.fields["seq_len"] - answer, answer, rollout))


def _preference(run: Builder, task: str) -> None:
    """Set what passes beside plain samples: pairs, a reference or a second batch, and TRL's head or a loss of all logits."""
    adapters = run.fields.get("lora_rank") is not None
    passes = passes_of(task, adapters=adapters)
    if run.flag("precompute_ref_log_probs"):
        passes.pop("reference", None)
    if task == "kto" and run.word("loss_type") == "apo_zero_unpaired":
        passes.pop("kl_batch")
    if task == "cpo" and (run.amount("cpo_alpha") == 0 or run.word("loss_type") == "alphapo"):
        passes["pair_loss"] = PairLoss.RANKING.value
    for field, value in passes.items():
        run.set(field, value)
    _without_dropout(run)
    if task == "reward":
        if adapters:
            run.leave_out("task reward", Effect.MORE, "the head for scores is trained whole beside the adapters")
        return
    run.assume(f"all tokens of a {'pair' if run.fields.get('pairs') else 'sample'} count, its prompt's too")
    if run.data.get("fsdp") and run.fields.get("chunked_head"):
        run.leave_out("fsdp", Effect.UNKNOWN, _GATHERS)


def _without_dropout(run: Builder) -> None:
    """Switch the adapters' dropout off, as ``disable_dropout`` does by default."""
    if run.flag("disable_dropout") is not False:
        run.set("lora_dropout", False)
        run.assumed = [clause for clause in run.assumed if not clause.startswith("lora_dropout ")]


def _task(run: Builder) -> str:
    """The trainer: by the command or ``--task``, else by the arguments that only it has, else the commonest.

    Raises:
        BadInput: nothing decides, and the names of the file, its data or its output speak of another one.
    """
    command = run.document.command
    if run.document.script is not None and run.document.script.task:
        return run.document.script.task
    if command is not None:
        said = re.search(r"(sft|dpo|grpo|kto|orpo|cpo|reward|rloo|ppo|bco|gkd)", command.program.rpartition("/")[2])
        if said:
            return said[1]
    for task, keys in _TASK_KEYS:
        found = [key for key in keys if key in run.data]
        if found:
            run.assume(f"{task.upper()}, since {found[0]} is set")
            return task
    loss = run.data.get("loss_type")
    for task, losses in _LOSSES.items():
        if isinstance(loss, str) and loss in losses:
            run.assume(f"{task.upper()}, since loss_type is {loss}")
            return task
    if run.word("lora_task_type") == "seq_cls":
        run.assume("REWARD, since lora_task_type is SEQ_CLS")
        return "reward"
    if run.document.task:
        return run.document.task
    found = [key for key in _REFERENCE_KEYS if key in run.data]
    task = "dpo" if found else "sft"
    if not found and (sure := [key for key in _SFT_KEYS if key in run.data]):
        run.assume(f"SFT, since {sure[0]} is set")
        return task
    other = sorted(_named_tasks(run) - {task})
    if other:
        raise BadInput(
            f"could be a recipe of {task.upper()} or of {' or '.join(one.upper() for one in other)}: no key decides",
            where=run.name,
            remedy=f"say which: --task {task} or --task {other[0]}",
        )
    run.assume(f"DPO, since {found[0]} is set" if found else "SFT, since no key of another trainer is set")
    return task


def _named_tasks(run: Builder) -> set[str]:
    """Tasks of which the names of the file, its folder, its data and its output speak."""
    path = [] if run.document.folder is None else run.document.name.lower().split("/")[-2:]
    said = " ".join([*path, *(str(run.data.get(key, ""))[:500] for key in _NAMES)]).lower()
    return {_SAME.get(word, word) for word in _WORDS.findall(said)}


def _length(run: Builder, task: str) -> None:
    if task in _COMPLETION_TASKS:
        answer = run.number("max_completion_length") or run.number("response_length")
        if answer is None:
            answer = _RESPONSE if task == "ppo" else _ANSWER
            run.assume(f"response_length {answer}" if task == "ppo" else f"max_completion_length {answer}")
        prompt = run.number("max_prompt_length")
        if prompt is None:
            prompt = 512
            run.assume("prompts of 512 tokens: nothing bounds them")
        run.set("seq_len", prompt + answer, "max_completion_length")
        if task != "ppo":  # TRL's head over the completion alone
            run.set("chunked_head", True)
            run.set("labelled_share", answer / (prompt + answer))
        return
    for key in ("max_length", "max_seq_length"):
        if run.number(key) is not None:
            run.count("seq_len", key)
            break
        if key in run.data and run.data[key] is None:
            run.leave_out(key, Effect.UNKNOWN, "samples are not cut, so nothing bounds their length")
            return
    else:
        run.assume("max_length 1024", seq_len=1024)
    multiple, length = run.number("pad_to_multiple_of"), run.fields.get("seq_len")
    if multiple and length and length % multiple:
        run.set("seq_len", -(-length // multiple) * multiple, "pad_to_multiple_of")
    if run.flag("packing") and "seq_len" in run.keys:
        run.keys["seq_len"] += " (packed)"
