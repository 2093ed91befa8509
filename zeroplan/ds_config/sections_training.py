"""Sections on precision, optimizer, learning-rate schedule, activation checkpointing and files."""

from __future__ import annotations

from zeroplan.core.layer_drop import LAYER_DROP, ProgressiveLayerDrop
from zeroplan.core.quantize_training import QUANTIZE_TRAINING, QuantizeTraining
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.core.zero_config import ActivationCheckpointing, Aio, ZeroConfig
from zeroplan.ds_config.coercion import ValueKind
from zeroplan.ds_config.schema import BOOL, FLOAT, HONOURED, IGNORED, INT, REFUSED, STR, Mode, free, mem, other, section

FP16 = section(
    "fp16",
    Mode.MODEL,
    "runtime/precision_config.py",
    mem("enabled", BOOL, "", default=False, runtime=HONOURED),
    free("auto_cast", BOOL, False, runtime=HONOURED),
    mem("loss_scale", ValueKind.LOSS_SCALE, runtime=HONOURED),
    free("initial_scale_power", INT, 16, runtime=HONOURED),
    free("loss_scale_window", ValueKind.SCALE_INT, 1000, runtime=HONOURED),
    free("hysteresis", INT, 2, runtime=HONOURED),
    free("consecutive_hysteresis", BOOL, False, runtime=HONOURED),
    free("min_loss_scale", ValueKind.SCALE_INT, 1, runtime=HONOURED),
    mem("fp16_master_weights_and_grads", BOOL, runtime=REFUSED),
    holder=ZeroConfig,
)

BF16 = section(
    "bf16",
    Mode.MODEL,
    "runtime/precision_config.py",
    mem("enabled", BOOL, "", default=False, runtime=HONOURED),
    mem("immediate_grad_update", BOOL, runtime=REFUSED),
    mem("check_grad_overflow", BOOL, runtime=HONOURED),
    mem("bf16_master_weights_and_grads", BOOL, runtime=REFUSED),
    mem("bf16_optimizer_states", BOOL, runtime=REFUSED),
    holder=ZeroConfig,
)

DATA_TYPES = section(
    "data_types",
    Mode.PLAIN,
    "runtime/constants.py",
    mem("grad_accum_dtype", ValueKind.DTYPE, optional=True, runtime=HONOURED),
    mem("param_dtype", ValueKind.DTYPE, "", optional=True, runtime=REFUSED),
    other("buffer_dtype", ValueKind.DTYPE, optional=True),
    other("keep_in_fp32_modules", ValueKind.ANY, "auto"),
    holder=ZeroConfig,
)

TORCH_AUTOCAST = section(
    "torch_autocast",
    Mode.PLAIN,
    "runtime/config.py",
    mem("enabled", BOOL, "", default=False, runtime=REFUSED),
    mem("dtype", ValueKind.DTYPE, "", optional=True, runtime=REFUSED),
    other("lower_precision_safe_modules", ValueKind.STRINGS, optional=True),
)

OPTIMIZER = section(
    "optimizer",
    Mode.PLAIN,
    "runtime/config.py",
    mem("type", STR, "", optional=True, runtime=HONOURED),
    mem("params", ValueKind.SECTION, "", optional=True, runtime=HONOURED),
    free("legacy_fusion", BOOL, False),
)

SCHEDULER = section(
    "scheduler",
    Mode.PLAIN,
    "runtime/config.py",
    free("type", STR, optional=True, runtime=HONOURED),
    free("params", ValueKind.SECTION, optional=True, runtime=HONOURED),
)

OPTIMIZER_PARAMS = section("optimizer.params", Mode.OPEN, "runtime/engine.py")
SCHEDULER_PARAMS = section("scheduler.params", Mode.OPEN, "runtime/lr_schedules.py")

ACTIVATION_CHECKPOINTING = section(
    "activation_checkpointing",
    Mode.PLAIN,
    "runtime/activation_checkpointing/config.py",
    mem("partition_activations", BOOL, runtime=HONOURED),
    mem("cpu_checkpointing", BOOL, runtime=HONOURED),
    mem("contiguous_memory_optimization", BOOL),
    mem("number_checkpoints", INT, optional=True, lo=1),
    mem("synchronize_checkpoint_boundary", BOOL),
    mem("profile", BOOL),
    holder=ActivationCheckpointing,
)

AIO = section(
    "aio",
    Mode.PLAIN,
    "runtime/swap_tensor/aio_config.py",
    mem("block_size", INT, runtime=HONOURED),
    mem("queue_depth", INT, runtime=HONOURED),
    # The older name comes first, so that the newer one decides where a file holds both.
    mem("thread_count", INT, "intra_op_parallelism", replaced_by="intra_op_parallelism", deepspeed=IGNORED, runtime=HONOURED),
    mem("intra_op_parallelism", INT, runtime=HONOURED),
    mem("single_submit", BOOL, runtime=HONOURED),
    mem("overlap_events", BOOL, runtime=HONOURED),
    mem("use_gds", BOOL, runtime=HONOURED),
    holder=Aio,
)

#: DeepSpeed removed it in 0.19.7 (:data:`zeroplan.ds_config.sections.REMOVED`); the included runtime applies it.
SPARSE_ATTENTION = section(
    "sparse_attention",
    Mode.PLAIN,
    "runtime/config.py",
    *(
        mem(name, kind, deepspeed=REFUSED, runtime=HONOURED, optional=name == "global_block_end_indices")
        for name, kind in {
            "mode": STR,
            "block": INT,
            "different_layout_per_head": BOOL,
            "num_local_blocks": INT,
            "num_global_blocks": INT,
            "attention": STR,
            "horizontal_global_attention": BOOL,
            "num_different_global_patterns": INT,
            "num_random_blocks": INT,
            "local_window_blocks": ValueKind.LIST,
            "global_block_indices": ValueKind.LIST,
            "global_block_end_indices": ValueKind.LIST,
            "num_sliding_window_blocks": INT,
        }.items()
    ),
    holder=SparseAttention,
)

#: DeepSpeed removed it in 0.19.8; the included runtime has it (:mod:`zeroplan.ds_config.runtime_sections`).
CURRICULUM = section(
    "curriculum_learning",
    Mode.PLAIN,
    "runtime/config.py",
    mem("enabled", BOOL, "", default=False, deepspeed=REFUSED, runtime=HONOURED),
    mem("curriculum_type", STR, "", deepspeed=REFUSED, runtime=HONOURED, note="seqlen"),
    mem("min_difficulty", INT, "", deepspeed=REFUSED, runtime=HONOURED, note="tokens"),
    mem("max_difficulty", INT, "", deepspeed=REFUSED, runtime=HONOURED, note="tokens"),
    mem("schedule_type", STR, "", deepspeed=REFUSED, runtime=HONOURED),
    mem("schedule_config", ValueKind.SECTION, "", deepspeed=REFUSED, runtime=HONOURED),
)
CURRICULUM_SCHEDULE = section(
    "curriculum_learning.schedule_config",
    Mode.PLAIN,
    "runtime/data_pipeline/curriculum_scheduler.py",
    mem("total_curriculum_step", INT, "", deepspeed=REFUSED, runtime=HONOURED),
    mem("difficulty_step", INT, "", deepspeed=REFUSED, runtime=HONOURED),
    mem("root_degree", FLOAT, "", deepspeed=REFUSED, runtime=HONOURED),
    mem("difficulty", ValueKind.LIST, "", deepspeed=REFUSED, runtime=HONOURED),
    mem("max_step", ValueKind.LIST, "", deepspeed=REFUSED, runtime=HONOURED),
)

#: DeepSpeed removed it in 0.19.8; the included runtime has it. Defaults are those of DeepSpeed's ``ProgressiveLayerDrop``.
PROGRESSIVE_LAYER_DROP = section(
    LAYER_DROP,
    Mode.PLAIN,
    "runtime/config.py",
    mem("enabled", BOOL, "", default=False, deepspeed=REFUSED, runtime=HONOURED),
    mem("theta", FLOAT, deepspeed=REFUSED, runtime=HONOURED),
    mem("gamma", FLOAT, deepspeed=REFUSED, runtime=HONOURED),
    holder=ProgressiveLayerDrop,
)

_MOQ = {"deepspeed": REFUSED, "runtime": HONOURED}
#: DeepSpeed removed it in 0.19.7; the included runtime has it (:mod:`zeroplan.ds_config.runtime_sections`).
QUANTIZE = (
    section(
        QUANTIZE_TRAINING,
        Mode.PLAIN,
        "runtime/config.py",
        mem("enabled", BOOL, "", default=False, **_MOQ),
        mem("quantize_groups", INT, **_MOQ),
        mem("quantize_type", STR, "", **_MOQ),
        *(
            mem(name, ValueKind.SECTION, "", **_MOQ)
            for name in ("quantize_bits", "quantize_schedule", "quantize_algo", "fp16_mixed_quantize", "eigenvalue")
        ),
        free("quantize_verbose", BOOL, False, deepspeed=REFUSED),
        free("quantizer_kernel", BOOL, False, deepspeed=REFUSED),
        holder=QuantizeTraining,
    ),
    section(
        f"{QUANTIZE_TRAINING}.quantize_bits",
        Mode.PLAIN,
        "runtime/config.py",
        mem("start_bits", INT, **_MOQ),
        mem("target_bits", INT, **_MOQ),
        holder=QuantizeTraining,
    ),
    section(
        f"{QUANTIZE_TRAINING}.quantize_schedule",
        Mode.PLAIN,
        "runtime/config.py",
        mem("quantize_period", INT, **_MOQ, note="steps"),
        mem("schedule_offset", INT, **_MOQ, note="steps"),
        holder=QuantizeTraining,
    ),
    section(
        f"{QUANTIZE_TRAINING}.quantize_algo",
        Mode.PLAIN,
        "runtime/config.py",
        mem("q_type", STR, **_MOQ),
        mem("rounding", STR, **_MOQ),
        holder=QuantizeTraining,
    ),
    section(
        f"{QUANTIZE_TRAINING}.fp16_mixed_quantize",
        Mode.PLAIN,
        "runtime/config.py",
        mem("enabled", BOOL, "", default=False, **_MOQ),
        mem("quantize_change_ratio", FLOAT, "", default=0.001, **_MOQ),
    ),
    section(f"{QUANTIZE_TRAINING}.eigenvalue", Mode.OPEN, "runtime/config.py"),
)

TRAINING = (
    FP16,
    BF16,
    DATA_TYPES,
    TORCH_AUTOCAST,
    OPTIMIZER,
    OPTIMIZER_PARAMS,
    SCHEDULER,
    SCHEDULER_PARAMS,
    ACTIVATION_CHECKPOINTING,
    AIO,
    SPARSE_ATTENTION,
    CURRICULUM,
    CURRICULUM_SCHEDULE,
    PROGRESSIVE_LAYER_DROP,
    *QUANTIZE,
)
