"""Files that lie beside a run's own and describe no run: each is refused with what to give in its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput

_AS_MODEL = "give it as MODEL, before --from"
_ARGUMENTS = "give the program's own file: its recipe, its arguments, or the command line"
#: Keys that only such a file has, what it is, and what to give.
_KINDS: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset(("log_history", "global_step")), "is the Trainer's log of a checkpoint", _ARGUMENTS),
    (frozenset(("weight_map",)), "is the index of a checkpoint", _AS_MODEL),
    (frozenset(("model_type", "architectures")), "is a model's config", _AS_MODEL),
    (frozenset(("model_type", "hidden_size")), "is a model's config", _AS_MODEL),
    (frozenset(("tokenizer_class",)), "is a tokenizer's config", _ARGUMENTS),
    (frozenset(("added_tokens", "model")), "is a tokenizer", _ARGUMENTS),
    (frozenset(("model", "pre_tokenizer")), "is a tokenizer", _ARGUMENTS),
    (frozenset(("bos_token",)), "is a tokenizer's map", _ARGUMENTS),
    (frozenset(("max_length", "transformers_version")), "is a model's settings for generation", _ARGUMENTS),
    (frozenset(("eos_token_id", "transformers_version")), "is a model's settings for generation", _ARGUMENTS),
    (frozenset(("cells", "nbformat")), "is a notebook", "give the arguments that it makes, as JSON or YAML"),
    (frozenset(("apiVersion", "kind")), "is a manifest of Kubernetes", "give the command line that it starts, in a .sh file"),
)
_OWN_ENGINE = "no engine here plans that: plan the model by flags, MODEL --engine megatron --tp 2 --pp 2"
#: Keys that only files of programs with an engine of their own have, whatever else they hold, and that program.
_ENGINES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("tokens", "parallelism", "general"), "nanotron"),
    (("pipe_parallel_size", "num_layers"), "GPT-NeoX"),
    (("model_parallel_size", "num_layers"), "GPT-NeoX"),
    (("train_iters", "zero_optimization"), "GPT-NeoX"),
    (("device_train_microbatch_size", "max_seq_len"), "LLM Foundry"),
    (("device_train_microbatch_size", "variables"), "LLM Foundry"),
)
#: Programs that train with several models and engines of their own at once, and what only their commands have.
_OTHERS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\bopenrlhf\.cli\.|\bopenrlhf/cli/"), "OpenRLHF"),
    (re.compile(r"\bverl\.trainer\.|\bverl/trainer/|actor_rollout_ref\."), "verl"),
    (re.compile(r"--critic_model_name_or_path\b|--num_padding_at_beginning\b"), "DeepSpeed-Chat"),
    (re.compile(r"\bskyrl_train\.|\bskyrl\.train\."), "SkyRL"),
    (re.compile(r"\bnemo_rl\b|examples/run_grpo_math\.py"), "NeMo RL"),
)
#: Keys of a run: a file with one of them is judged by its programs, whatever else it holds.
_OF_A_RUN = (
    "learning_rate",
    "per_device_train_batch_size",
    "micro_batch_size",
    "output_dir",
    "zero_optimization",
    "batch_size",
)


def refuse_other_file(data: Mapping[str, Any], name: str) -> None:
    """Refuse a file that describes no run."""
    plain = {str(key).replace("-", "_") for key in data}
    for own, title in _ENGINES:
        if plain.issuperset(own):
            raise BadInput(f"is a file of {title}, whose engine and model code are its own", where=name, remedy=_OWN_ENGINE)
    if isinstance(data.get("defaults"), list):
        what = "is composed of other files by Hydra (defaults)"
        raise BadInput(what, where=name, remedy="give what Hydra makes of it: the program with --cfg job > run.yaml")
    if any(key in data for key in _OF_A_RUN):
        return
    if "peft_type" in data:
        raise BadInput(f"is the config of an adapter on {_base(data)}", where=name, remedy=adapter_flags(data))
    for keys, what, remedy in _KINDS:
        if keys <= data.keys():
            raise BadInput(what, where=name, remedy=remedy)


def refuse_other_program(text: str, name: str) -> None:
    """Refuse a script of a program that is known by its command, and whose files are not read."""
    for pattern, title in _OTHERS:
        if pattern.search(text):
            raise BadInput(
                f"is a command of {title}, whose files are not read: several models and their own engines share its GPUs",
                where=name,
                remedy="plan each model that it trains by flags: MODEL --engine deepspeed --stage 3 --gpus 8",
            )


#: Arguments that only Megatron's scripts have, and those by which Megatron-DeepSpeed's hand the engine to DeepSpeed.
MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_attention_heads")
_TO_DEEPSPEED = ("deepspeed", "deepspeed_config", "zero_stage", "deepspeed_activation_checkpointing", "no_pipeline_parallel")


def refuse_megatron_deepspeed(data: Mapping[str, Any], name: str, launcher: str = "") -> None:
    """Refuse arguments of Megatron-DeepSpeed: Megatron's layers under DeepSpeed's engine, whose stage and optimizer count.

    Source: Megatron-DeepSpeed, ``megatron/arguments.py`` (``_add_zero_args``, ``_add_distributed_args``,
    ``_add_activation_checkpoint_args``) and ``deepspeed.add_config_arguments``.
    """
    key = next((f"--{one}" for one in _TO_DEEPSPEED if data.get(one) not in (None, False)), "")
    key = key or ("deepspeed, the launcher" if launcher == "deepspeed" else "")
    if key and any(one in data for one in MEGATRON):
        raise BadInput(
            "is a command of Megatron-DeepSpeed: ZeRO, the optimizer and the pipeline are DeepSpeed's over Megatron's layers",
            where=f"{name}: {key}",
            remedy="no engine here plans both: plan a model of these sizes by flags, MODEL --engine deepspeed --stage 1",
        )


#: Arguments that every training script of diffusers has, and those of which each has one.
_DIFFUSES = ("resolution", "instance_data_dir", "instance_prompt", "train_data_dir", "center_crop", "vae_path")


def refuse_diffusers(data: Mapping[str, Any], name: str) -> None:
    """Refuse a command of diffusers' training scripts. Source: diffusers, ``examples/`` (``parse_args`` of its scripts)."""
    if "pretrained_model_name_or_path" in data and any(key in data for key in _DIFFUSES):
        what = "is a command of diffusers: a text encoder, a VAE and a denoiser, which are not planned"
        raise BadInput(what, where=name, remedy="give a run of a model of transformers")


def _base(data: Mapping[str, Any]) -> str:
    return str(data.get("base_model_name_or_path") or "a model that it does not name")[:120]


def adapter_flags(data: Mapping[str, Any]) -> str:
    """Return the flags that ask for the adapter of peft's adapter_config.json."""
    rank, targets = data.get("r"), data.get("target_modules")
    words = [f"--lora-rank {rank}"] if isinstance(rank, int) else []
    if isinstance(targets, list) and all(isinstance(one, str) for one in targets):
        words.append(f"--lora-targets {','.join(sorted(targets))[:200]}")
    return f"give that model with {' '.join(words)}" if words else "give that model"
