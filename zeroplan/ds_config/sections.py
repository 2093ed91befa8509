"""Every section of a ds_config, the top level among them, and the keys that DeepSpeed took out.

Sources: runtime/config.py, runtime/constants.py, runtime/zero/config.py, runtime/zero/offload_config.py and
runtime/precision_config.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.coercion import ValueKind
from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan.ds_config.schema import (
    BOOL,
    FLOAT,
    HONOURED,
    IGNORED,
    INT,
    REFUSED,
    STR,
    Key,
    MemoryEffect,
    Mode,
    Section,
    free,
    mem,
    other,
    section,
)
from zeroplan.ds_config.sections_monitoring import MONITORING
from zeroplan.ds_config.sections_parallel import PARALLEL
from zeroplan.ds_config.sections_training import TRAINING
from zeroplan.ds_config.sections_zero import LEAF_MODULE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZENFLOW, ZERO

ZEROPLAN = section(
    "zeroplan",
    Mode.EXACT,
    "",
    mem("ring", INT, lo=2, deepspeed=IGNORED, runtime=HONOURED),
    mem("wide_numel", INT, lo=1, deepspeed=IGNORED, runtime=HONOURED),
    mem("direct_linear", BOOL, deepspeed=IGNORED, runtime=HONOURED),
    mem("fused_loss", BOOL, deepspeed=IGNORED, runtime=HONOURED),
    mem("labelled_tokens_only", BOOL, deepspeed=IGNORED, runtime=HONOURED),
    mem("chunked_cross_entropy", INT, lo=0, deepspeed=IGNORED, runtime=HONOURED),
    mem("float8", STR, deepspeed=IGNORED, runtime=HONOURED),
    mem("float8_gathers", BOOL, deepspeed=IGNORED, runtime=HONOURED),
    mem("num_layers_at_start_in_bf16", INT, lo=0, deepspeed=IGNORED, runtime=HONOURED),
    mem("num_layers_at_end_in_bf16", INT, lo=0, deepspeed=IGNORED, runtime=HONOURED),
    free("copy_engine_gathers", BOOL, attr="copy_engine_gathers", deepspeed=IGNORED, runtime=HONOURED),
    mem("async_checkpoints", BOOL, deepspeed=IGNORED, runtime=HONOURED),
    free("audit_steps", INT, attr="audit_steps", lo=0, deepspeed=IGNORED, runtime=HONOURED),
    free("timeout", FLOAT, attr="timeout", lo=1, deepspeed=IGNORED, runtime=HONOURED),
    mem("delayed_update", INT, lo=0, deepspeed=IGNORED, runtime=HONOURED),
    free("nvme_in_memory", BOOL, attr="nvme_in_memory", deepspeed=IGNORED, runtime=HONOURED),
    holder=RuntimeOptions,
)


_SEC = ValueKind.SECTION

TOP = section(
    "",
    Mode.PLAIN,
    "runtime/config.py",
    mem("train_batch_size", INT, "", runtime=HONOURED),
    mem("train_micro_batch_size_per_gpu", INT, "", runtime=HONOURED),
    mem("gradient_accumulation_steps", INT, "", runtime=HONOURED),
    free("managed_gradient_accumulation", BOOL, True, runtime=HONOURED),
    mem("gradient_clipping", FLOAT, runtime=HONOURED),
    mem("prescale_gradients", BOOL),
    mem("gradient_predivide_factor", FLOAT),
    free("gradient_allreduce_op", STR, "mean", runtime=REFUSED),
    mem("communication_data_type", ValueKind.DTYPE, optional=True, runtime=HONOURED),
    mem("seq_parallel_communication_data_type", ValueKind.DTYPE, optional=True),
    mem("zero_allow_untested_optimizer", BOOL),
    mem("zero_force_ds_cpu_optimizer", BOOL),
    *(mem(name, _SEC, "", runtime=HONOURED) for name in ("zero_optimization", "fp16", "optimizer", "data_types")),
    mem("bf16", _SEC, "", optional=True, runtime=HONOURED),
    mem("bfloat16", _SEC, "", replaced_by="bf16", runtime=HONOURED),
    mem("torch_autocast", _SEC, "", runtime=REFUSED),
    mem("activation_checkpointing", _SEC, "", runtime=HONOURED),
    mem("aio", _SEC, "", optional=True, runtime=HONOURED),
    mem("sparse_attention", _SEC, "", deepspeed=REFUSED, runtime=HONOURED),
    mem("curriculum_learning", _SEC, "", deepspeed=REFUSED, runtime=HONOURED),
    mem("progressive_layer_drop", _SEC, "", deepspeed=REFUSED, runtime=HONOURED),
    mem("quantize_training", _SEC, "", deepspeed=REFUSED, runtime=HONOURED),
    free("allgather_size", INT, 500_000_000, note="read only beside zero_optimization: true"),
    free("scheduler", _SEC, runtime=HONOURED),
    free("steps_per_print", INT, optional=True),
    free("disable_allgather", BOOL, False),
    free("dump_state", BOOL, False),
    free("disable_python_gc", BOOL, False, runtime=REFUSED),
    free("wall_clock_breakdown", BOOL, False),
    free("memory_breakdown", BOOL, False),
    free("vocabulary_size", INT, optional=True),
    free("dataloader_drop_last", BOOL, False, runtime=HONOURED),
    free("log_level", STR, optional=True),
    free("use_data_before_expert_parallelism", BOOL, False),
    *(free(name, _SEC) for name in ("comms_logger", "comet", "timers")),
    *(free(name, _SEC, runtime=HONOURED) for name in ("tensorboard", "wandb", "csv_monitor", "flops_profiler")),
    free("checkpoint", _SEC),
    free("autotuning", _SEC, runtime=REFUSED),
    free("datastates_ckpt", _SEC, optional=True, runtime=REFUSED),
    other("sequence_parallel_size", INT),
    other("data_parallel_size", INT),
    *(other(name, _SEC) for name in ("compile", "hybrid_engine", "tensor_parallel")),
    other("expert_parallel", _SEC, optional=True),
    *(other(name, _SEC) for name in ("weight_quantization", "pipeline")),
    other("data_efficiency", _SEC, runtime=HONOURED),
    mem("zeroplan", _SEC, "", deepspeed=IGNORED, runtime=HONOURED, note="of zeroplan's runtime"),
    holder=ZeroConfig,
)

#: Every section by its dotted path.
SECTIONS: dict[str, Section] = {
    one.path: one
    for one in (
        TOP,
        ZERO,
        OFFLOAD_PARAM,
        OFFLOAD_OPTIMIZER,
        ZENFLOW,
        LEAF_MODULE,
        *TRAINING,
        *MONITORING,
        *PARALLEL,
        ZEROPLAN,
    )
}

#: Keys that DeepSpeed 0.19 took out and refuses (runtime/config.py), by their dotted path, with what to do instead.
REMOVED: dict[str, str] = {
    "nebula": "checkpoints go through torch.save",
    "compression_training": "the compression library is gone",
    "amp": "use fp16, bf16 or torch_autocast",
    "quantize_training": "zeroplan's runtime has mixture-of-quantization (--engine zeroplan)",
    "sparse_gradients": "embeddings built with sparse=True need no flag",
    "eigenvalue": "it served mixture-of-quantization",
    "sparse_attention": "zeroplan's runtime has it (--engine zeroplan)",
    "elasticity": "set the batch sizes directly",
    "graph_harvesting": "it is gone",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning, or zeroplan's runtime (--engine zeroplan)",
    "progressive_layer_drop": "zeroplan's runtime has it (--engine zeroplan)",
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
    """Return the key of a dotted path such as ``zero_optimization.stage3_max_live_parameters``; None for an unknown one."""
    parent, _, name = path.rpartition(".")
    holder = SECTIONS.get("bf16" if parent == "bfloat16" else parent)
    return holder.find(name) if holder else None


def effects(path: str) -> MemoryEffect:
    """Return what the key of a dotted path does to memory."""
    key = find_key(path)
    if key is not None:
        return key.effect
    if path in REMOVED:
        return MemoryEffect.REMOVED
    parent, _, name = path.rpartition(".")
    if parent == "optimizer.params":
        return MemoryEffect.MEMORY if name in _OPTIMIZER_MEMORY else MemoryEffect.NONE
    head = path.partition(".")[0]
    for prefix in (parent, head):
        holder = SECTIONS.get(prefix)
        if holder is not None and holder.mode is Mode.OPEN:
            owner = find_key(prefix)
            return owner.effect if owner else MemoryEffect.NONE
    return MemoryEffect.UNKNOWN


_OPTIMIZER_MEMORY = frozenset(
    {"torch_adam", "fp32_optimizer_states", "momentum", "amsgrad", "foreach", "fused", "nesterov", "weight_decay"}
)
