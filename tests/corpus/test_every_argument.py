"""No silent key: every argument of every program is listed, and those that move memory are read or left out by name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.corpus.argument_names import field_names
from zeroplan.core.unmodelled import may_add
from zeroplan.interop.programs.known import LISTED, moving_in, names_in
from zeroplan.interop.readers import read_setup

#: A minimal file of each program.
MINIMAL: dict[str, dict[str, Any]] = {
    "hf-trainer": {"output_dir": "o", "per_device_train_batch_size": 1, "learning_rate": 1e-5},
    "trl": {"model_name_or_path": "m", "packing": False, "max_length": 512},
    "llama-factory": {"model_name_or_path": "m", "finetuning_type": "full", "cutoff_len": 512},
    "axolotl": {"base_model": "m", "datasets": [], "micro_batch_size": 1, "sequence_len": 512},
    "open-instruct": {"model_name_or_path": "m", "max_seq_length": 512, "use_flash_attn": True, "deepspeed_stage": 3},
    "ms-swift": {"model": "m", "tuner_type": "full", "max_length": 512},
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
        "tokenizer": {"max_seq_len": 512},
        "epochs": 1,
    },
    "torchtitan": {"model.flavor": "8B", "parallelism.tensor_parallel_degree": 1},
    "litgpt": {"checkpoint_dir": "m", "train": {"micro_batch_size": 1, "global_batch_size": 1, "max_seq_length": 512}},
}
#: Programs with a list of their own keys.
EVERY = tuple(MINIMAL)
#: Values of arguments that take no switch.
VALUES: dict[str, Any] = {
    "parallelism_config": {"tp_size": 2},
    "optim_target_modules": ["q_proj"],
    "attn_implementation": "flex_attention",
    "lora_bias": "all",
    "packing_length": 4096,
    "neat_packing": True,
    "optimizer_type": "muon",
    **dict.fromkeys(
        (
            *(f"parallelism.{name}_parallel_degree" for name in ("tensor", "context", "pipeline", "expert", "expert_tensor")),
            *(f"{section}.tensor_parallel_degree" for section in ("training", "experimental")),
            *(f"experimental.{name}_parallel_degree" for name in ("context", "pipeline")),
            *(
                f"{section}.data_parallel_{kind}_degree"
                for section in ("training", "parallelism")
                for kind in ("shard", "replicate")
            ),
            *("parallelism.pipeline_parallel_layers_per_stage", "training.local_batch_size", "training.batch_size"),
            *("training.seq_len", "training.global_batch_size", "training.num_tokens_per_train_step"),
            *("training.num_tokens_per_microbatch_per_dp_rank", "training.max_context_length"),
            *("expert_parallel_size", "tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"),
            "dp_replicate_size",
        ),
        4,
    ),
    "training.global_batch_size": 64,
    "training.num_tokens_per_train_step": 1 << 20,
    "training.num_tokens_per_microbatch_per_dp_rank": 4096,
    "training.dtype": "bfloat16",
    "training.mixed_precision_param": "float32",
    "training.mixed_precision_reduce": "bfloat16",
    "activation_checkpoint.mode": "full",
    "activation_checkpoint.selective_ac_option": "op",
    "parallelism.fsdp_reshard_after_forward": "never",
    "parallelism.context_parallel_rotate_method": "alltoall",
    "model.flavor": "70B",
    "model.converters": ["float8"],
    "optimizer.name": "Adam",
    "optimizer.implementation": "foreach",
    "parallelism.module_fqns_per_model_part": [["tok_embeddings"]],
    "quantize.grouped_mm.float8.fqns": ["experts"],
    "quantize.grouped_mm.mx.fqns": ["experts"],
}


def test_every_name_is_classified() -> None:
    assert set(LISTED) < set(EVERY)
    for name in EVERY:
        assert not [one for one in names_in(name) if one.endswith("?")], name
        assert moving_in(name) <= names_in(name)
        assert moving_in(name), name


@pytest.mark.parametrize("program", EVERY)
def test_an_argument_that_moves_memory_changes_the_setup_or_is_listed(program: str) -> None:
    """Each by itself: a field of the Setup, or a key that is left out with an effect."""
    plain = read_setup(MINIMAL[program], program)
    silent = []
    for key in sorted(moving_in(program)):
        setup = read_setup({**MINIMAL[program], key: VALUES.get(key, True)}, program)
        told = {one.key for one in setup.unmodelled} - {one.key for one in plain.unmodelled}
        fields = dataclasses.replace(setup, unmodelled=(), assumed=())
        if not told and fields == dataclasses.replace(plain, unmodelled=(), assumed=()):
            silent.append(key)
    assert silent == []


def test_a_key_that_is_switched_off_is_not_listed() -> None:
    for off in (False, None, 0, "", "false", [], "none"):
        assert not read_setup({**MINIMAL["axolotl"], "fp32_norms": off}).unmodelled
    on = read_setup({**MINIMAL["axolotl"], "fp32_norms": True})
    assert [one.key for one in on.unmodelled] == ["fp32_norms"]
    assert may_add(on.unmodelled)


@pytest.mark.torch
def test_the_lists_hold_every_argument_of_what_is_installed() -> None:
    """A new argument of transformers, peft or accelerate fails here until someone says whether it moves memory."""
    transformers = pytest.importorskip("transformers")
    fields = {
        *transformers.TrainingArguments.__dataclass_fields__,
        *transformers.Seq2SeqTrainingArguments.__dataclass_fields__,
    }
    assert {name for name in fields if not name.startswith("_")} - names_in("hf-trainer") == set()


@pytest.mark.torch
def test_every_option_of_accelerate_is_read_or_moves_no_memory() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    actions = launch.launch_command_parser()._actions
    options = {option.lstrip("-") for action in actions for option in action.option_strings if option.startswith("--")}
    beginnings = ("megatron_lm_", "tpu", "aws_", "deepspeed_", "main_", "rdzv_", "mpirun_", "fp8_", "dynamo_", "no-", "no_")
    unknown = {one for one in options if not one.startswith(beginnings) and "-" not in one} - ACCELERATE
    assert unknown == set()


@pytest.mark.torch
def test_every_option_of_an_adapter_is_read_or_moves_no_memory() -> None:
    peft = pytest.importorskip("peft")
    assert set(peft.LoraConfig.__dataclass_fields__) - ADAPTER == set()


def test_an_option_of_fsdp_that_moves_memory_is_listed() -> None:
    plain = {"distributed_type": "FSDP", "num_processes": 2}
    policy = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    assert not read_setup({**plain, "fsdp_config": policy}).unmodelled
    for options in (
        {"fsdp_auto_wrap_policy": "NO_WRAP"},
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000},
        {"fsdp_forward_prefetch": True},
        {"fsdp_mixed_precision_policy": {"param_dtype": "fp32"}},
    ):
        assert may_add(read_setup({**plain, "fsdp_config": {**policy, **options}}).unmodelled), options
    unnamed = read_setup({**plain, "fsdp_config": {"fsdp_version": 2}})
    assert [one.key for one in unnamed.unmodelled] == ["fsdp_config: auto_wrap_policy"]  # accelerate's default wraps nothing


def test_new_names_get_a_question_mark() -> None:
    assert field_names("class A:\n    x: int = 1\n    _y: int\n", frozenset()) == {"x"}


#: What of ``accelerate launch`` is read, or does not move the memory of a run on NVIDIA GPUs.
ACCELERATE = frozenset(
    json.loads(
        """["config_file", "quiet", "cpu", "multi_gpu", "use_deepspeed", "use_fsdp", "use_parallelism_config",
        "use_megatron_lm", "mixed_precision", "num_processes", "num_machines", "num_cpu_threads_per_process",
        "enable_cpu_affinity", "gpu_ids", "same_network", "machine_rank", "max_restarts", "monitor_interval", "module",
        "debug", "downcast_bf16", "role", "log_dir", "tee", "env", "vm", "help",
        "zero_stage", "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path",
        "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping", "zero3_init_flag",
        "zero3_save_16bit_model", "fsdp_version", "fsdp_offload_params", "fsdp_min_num_params", "fsdp_sharding_strategy",
        "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_backward_prefetch", "fsdp_state_dict_type", "fsdp_forward_prefetch", "fsdp_use_orig_params",
        "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_activation_checkpointing",
        "fsdp_activation_checkpointing_offload", "parallelism_config_cp_backend", "parallelism_config_cp_comm_strategy",
        "parallelism_config_cp_size", "parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size",
        "parallelism_config_sp_attn_implementation", "parallelism_config_sp_backend", "parallelism_config_sp_seq_length",
        "parallelism_config_sp_seq_length_is_variable", "parallelism_config_sp_size", "parallelism_config_tp_size"]"""
    )
)
#: What of peft's LoraConfig is read (by the names that programs give it), refused, or moves no memory.
ADAPTER = frozenset(
    json.loads(
        """["task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout",
        "fan_in_fan_out", "bias", "use_rslora", "modules_to_save", "init_lora_weights",
        "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config",
        "megatron_core", "trainable_token_indices", "loftq_config", "eva_config", "corda_config",
        "use_dora", "alora_invocation_tokens", "use_qalora", "qalora_group_size", "layer_replication",
        "runtime_config", "lora_bias", "target_parameters", "arrow_config", "ensure_weight_tying",
        "lora_ga_config", "monteclora_config", "use_bdlora", "velora_config", "tinylora_config",
        "kasa_config"]"""
    )
)
