"""The rest of the schema: the top level, and the sections that no line of the ledger reads."""

from __future__ import annotations

from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.schema import (
    ACTIVATION_CHECKPOINTING,
    AIO,
    BF16,
    DATA_TYPES,
    FP16,
    LEAF_MODULE,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    OPTIMIZER,
    SCHEDULER,
    TORCH_AUTOCAST,
    ZENFLOW,
    ZERO,
    B,
    Effect,
    F,
    I,
    Key,
    Mode,
    S,
    Section,
    free,
    held,
    mem,
    other,
)
from zeroplan.ds_config.values import Kind

_SEC = Kind.SECTION

TOP = Section(
    "",
    Mode.PLAIN,
    held(
        ZeroConfig,
        mem("train_batch_size", I, ""),
        mem("train_micro_batch_size_per_gpu", I, ""),
        mem("gradient_accumulation_steps", I, ""),
        free("managed_gradient_accumulation", B, True),
        mem("gradient_clipping", F),
        mem("prescale_gradients", B),
        mem("gradient_predivide_factor", F),
        free("gradient_allreduce_op", S, "mean"),
        mem("communication_data_type", Kind.DTYPE, optional=True),
        mem("seq_parallel_communication_data_type", Kind.DTYPE, optional=True),
        mem("zero_allow_untested_optimizer", B),
        mem("zero_force_ds_cpu_optimizer", B),
        *(mem(name, _SEC, "") for name in ("zero_optimization", "fp16", "optimizer", "data_types")),
        mem("bf16", _SEC, "", optional=True),
        mem("bfloat16", _SEC, "", replaced_by="bf16"),
        *(mem(name, _SEC, "") for name in ("torch_autocast", "activation_checkpointing")),
        mem("aio", _SEC, "", optional=True),
        free("allgather_size", I, 500_000_000, note="read only beside zero_optimization: true"),
        free("scheduler", _SEC),
        free("steps_per_print", I, optional=True),
        free("disable_allgather", B, False),
        free("dump_state", B, False),
        free("disable_python_gc", B, False),
        free("wall_clock_breakdown", B, False),
        free("memory_breakdown", B, False),
        free("vocabulary_size", I, optional=True),
        free("dataloader_drop_last", B, False),
        free("log_level", S, optional=True),
        free("use_data_before_expert_parallelism", B, False),
        *(free(name, _SEC) for name in ("comms_logger", "tensorboard", "wandb", "csv_monitor", "comet", "timers")),
        *(free(name, _SEC) for name in ("flops_profiler", "checkpoint", "autotuning")),
        free("datastates_ckpt", _SEC, optional=True),
        other("sequence_parallel_size", I),
        other("data_parallel_size", I),
        *(other(name, _SEC) for name in ("compile", "hybrid_engine", "tensor_parallel")),
        other("expert_parallel", _SEC, optional=True),
        *(other(name, _SEC) for name in ("weight_quantization", "data_efficiency", "pipeline")),
    ),
    "runtime/config.py",
)


def _section(path: str, mode: Mode, source: str, *keys: Key) -> Section:
    return Section(path, mode, {key.name: key for key in keys}, source)


_MODEL, _PLAIN, _OPEN = Mode.MODEL, Mode.PLAIN, Mode.OPEN

#: Every section by its dotted path.
SECTIONS: dict[str, Section] = {
    section.path: section
    for section in (
        TOP,
        ZERO,
        OFFLOAD_PARAM,
        OFFLOAD_OPTIMIZER,
        ZENFLOW,
        LEAF_MODULE,
        FP16,
        BF16,
        ACTIVATION_CHECKPOINTING,
        AIO,
        DATA_TYPES,
        TORCH_AUTOCAST,
        OPTIMIZER,
        SCHEDULER,
        _section("optimizer.params", _OPEN, "runtime/engine.py"),
        _section("scheduler.params", _OPEN, "runtime/lr_schedules.py"),
        _section(
            "comms_logger",
            _MODEL,
            "comm/config.py",
            free("enabled", B, False),
            free("prof_all", B, True),
            free("prof_ops", Kind.LIST, []),
            free("verbose", B, False),
            free("debug", B, False),
        ),
        *(
            _section(
                path,
                _MODEL,
                "monitor/config.py",
                free("enabled", B, False),
                free("output_path", S, ""),
                free("job_name", S, "DeepSpeedJobName"),
            )
            for path in ("tensorboard", "csv_monitor")
        ),
        _section(
            "wandb",
            _MODEL,
            "monitor/config.py",
            free("enabled", B, False),
            free("group", S, optional=True),
            free("team", S, optional=True),
            free("project", S, "deepspeed"),
        ),
        _section(
            "comet",
            _MODEL,
            "monitor/config.py",
            free("enabled", B, False),
            free("samples_log_interval", I, 100),
            *(free(name, S, optional=True) for name in ("project", "workspace", "api_key")),
            *(free(name, S, optional=True) for name in ("experiment_name", "experiment_key", "mode")),
            free("online", B, optional=True),
        ),
        _section("timers", _PLAIN, "utils/config.py", free("throughput", _SEC)),
        _section("timers.throughput", _MODEL, "utils/config.py", free("enabled", B, True), free("synchronized", B, True)),
        _section(
            "flops_profiler",
            _PLAIN,
            "profiling/config.py",
            free("enabled", B, False),
            free("recompute_fwd_factor", F, 0.0),
            free("profile_step", I, 1),
            free("module_depth", I, -1),
            free("top_modules", I, 1),
            free("detailed", B, True),
            free("output_file", S, optional=True),
        ),
        _section(
            "checkpoint",
            _PLAIN,
            "runtime/config.py, runtime/model_checkpointing/config.py",
            free("tag_validation", S, "WARN"),
            free("load_universal", B, False),
            free("use_node_local_storage", B, False),
            free("parallel_write", _SEC),
            free("checkpoint_serialization", B, True),
            free("writer", _SEC, optional=True),
        ),
        _section("checkpoint.parallel_write", _PLAIN, "runtime/config.py", free("pipeline_stage", B, False)),
        _section("checkpoint.writer", _OPEN, "runtime/model_checkpointing/config.py"),
        _section(
            "hybrid_engine",
            _MODEL,
            "runtime/config.py",
            other("enabled", B, False),
            other("max_out_tokens", I, 512, above=0),
            other("inference_tp_size", I, 1),
            other("release_inference_cache", B, False),
            other("pin_parameters", B, True),
            other("tp_gather_partition_size", I, 8),
            other("enable_cuda_graph", B, False),
        ),
        _section(
            "compile",
            _MODEL,
            "compile/config.py",
            *(other(name, B, False) for name in ("deepcompile", "autoep_non_moe", "free_activation", "offload_activation")),
            other("free_activation_threshold", I, 10 << 20),
            other("offload_activation_pin_memory", B, True),
            *(other(name, B, False) for name in ("offload_opt_states", "symmetric_memory", "debug_log", "offload_parameters")),
            other("double_buffer", B, True),
            *(other(name, B, False) for name in ("sync_before_reduce", "sync_after_reduce")),
            *(other(name, B, False) for name in ("sync_before_allgather", "sync_after_allgather")),
            other("keep_int_input_tensors", B, True),
            other("keep_all_input_tensors", B, False),
            other("passes", Kind.LIST, optional=True, note="z1, z3, autosp, autotp"),
        ),
        _section(
            "tensor_parallel",
            _MODEL,
            "runtime/tensor_parallel/config.py",
            other("dtype", Kind.ANY),
            other("autotp_size", I, 0),
            other("tp_overlap_comm", B, False),
            other("vocab_parallel_lm_head", B, optional=True),
            other("vocab_parallel_ce_backend", S, "torch"),
            other("tensor_parallel", _SEC, alias="tp"),
            other("injection_policy_tuple", Kind.ANY, optional=True),
            other("partition_config", _SEC, optional=True),
            other("preset_model", S, optional=True),
            other("keep_module_on_host", B, False),
            other("replace_with_kernel_inject", B, False, alias="kernel_inject"),
        ),
        _section("expert_parallel", _OPEN, "module_inject/auto_ep_config.py"),
        _section(
            "weight_quantization",
            _MODEL,
            "inference/config.py",
            other("enabled", B, True),
            other("num_bits", I, 8),
            other("q_type", S, "symmetric"),
            other("q_groups", I, 1),
            other("quantized_initialization", _SEC),
            other("post_init_quant", _SEC),
        ),
        *(_section(path, _OPEN, "runtime/config.py") for path in ("data_efficiency", "pipeline", "autotuning")),
        _section("datastates_ckpt", _OPEN, "datastates/config.py"),
    )
}

#: Keys that DeepSpeed 0.19 took out and refuses (runtime/config.py), by their dotted path, with what to do instead.
REMOVED: dict[str, str] = {
    "nebula": "checkpoints go through torch.save",
    "compression_training": "the compression library is gone",
    "amp": "use fp16, bf16 or torch_autocast",
    "quantize_training": "mixture-of-quantization is gone",
    "sparse_gradients": "embeddings built with sparse=True need no flag",
    "eigenvalue": "it served mixture-of-quantization",
    "sparse_attention": "it is gone",
    "elasticity": "set the batch sizes directly",
    "graph_harvesting": "it is gone",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "it is gone",
    "zero_optimization.mics_shard_size": "MiCS is gone; zero_hpz_partition_size keeps a second shard within a node",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS is gone",
    "zero_optimization.zeropp_loco_param": "zero_quantized_gradients works without it",
}

#: What transformers' Trainer puts in the place of "auto" (integrations/deepspeed.py of transformers 5.17).
HF_FILLS: frozenset[str] = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        *(f"scheduler.params.warmup_{name}" for name in ("min_lr", "max_lr", "num_steps")),
        "scheduler.params.total_num_steps",
        "fp16.enabled",
        "bf16.enabled",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.prefetch_bucket_size",
        "zero_optimization.param_persistence_threshold",
    }
)


def find_key(path: str) -> Key | None:
    """The key of a dotted path such as ``zero_optimization.stage3_max_live_parameters``, or None."""
    parent, _, name = path.rpartition(".")
    section = SECTIONS.get("bf16" if parent == "bfloat16" else parent)
    return section.find(name) if section else None


def effects(path: str) -> Effect:
    """What the key of a dotted path does to memory."""
    key = find_key(path)
    if key is not None:
        return key.effect
    if path in REMOVED:
        return Effect.REMOVED
    parent, _, name = path.rpartition(".")
    if parent == "optimizer.params":
        return Effect.MEMORY if name in _OPTIMIZER_MEMORY else Effect.NONE
    head = path.partition(".")[0]
    for prefix in (parent, head):
        section = SECTIONS.get(prefix)
        if section is not None and section.mode is Mode.OPEN:
            owner = find_key(prefix)
            return owner.effect if owner else Effect.NONE
    return Effect.UNKNOWN


_OPTIMIZER_MEMORY = frozenset({"torch_adam", "fp32_optimizer_states", "momentum", "amsgrad", "foreach", "fused", "nesterov"})
