"""Sections on monitoring, profiling and checkpoints. None of their keys has an effect on memory."""

from __future__ import annotations

from zeroplan.ds_config.coercion import Kind
from zeroplan.ds_config.schema import HONOURED, B, F, I, Mode, S, free, section

_SEC = Kind.SECTION

COMMS_LOGGER = section(
    "comms_logger",
    Mode.MODEL,
    "comm/config.py",
    free("enabled", B, False),
    free("prof_all", B, True),
    free("prof_ops", Kind.LIST, []),
    free("verbose", B, False),
    free("debug", B, False),
)

TENSORBOARD, CSV_MONITOR = (
    section(
        path,
        Mode.MODEL,
        "monitor/config.py",
        free("enabled", B, False, runtime=HONOURED),
        free("output_path", S, "", runtime=HONOURED),
        free("job_name", S, "DeepSpeedJobName", runtime=HONOURED),
    )
    for path in ("tensorboard", "csv_monitor")
)

WANDB = section(
    "wandb",
    Mode.MODEL,
    "monitor/config.py",
    free("enabled", B, False, runtime=HONOURED),
    free("group", S, optional=True, runtime=HONOURED),
    free("team", S, optional=True, runtime=HONOURED),
    free("project", S, "deepspeed", runtime=HONOURED),
)

COMET = section(
    "comet",
    Mode.MODEL,
    "monitor/config.py",
    free("enabled", B, False),
    free("samples_log_interval", I, 100),
    *(free(name, S, optional=True) for name in ("project", "workspace", "api_key")),
    *(free(name, S, optional=True) for name in ("experiment_name", "experiment_key", "mode")),
    free("online", B, optional=True),
)

TIMERS = section("timers", Mode.PLAIN, "utils/config.py", free("throughput", _SEC))
THROUGHPUT = section(
    "timers.throughput", Mode.MODEL, "utils/config.py", free("enabled", B, True), free("synchronized", B, True)
)

FLOPS_PROFILER = section(
    "flops_profiler",
    Mode.PLAIN,
    "profiling/config.py",
    free("enabled", B, False),
    free("recompute_fwd_factor", F, 0.0),
    free("profile_step", I, 1),
    free("module_depth", I, -1),
    free("top_modules", I, 1),
    free("detailed", B, True),
    free("output_file", S, optional=True),
)

CHECKPOINT = section(
    "checkpoint",
    Mode.PLAIN,
    "runtime/config.py, runtime/model_checkpointing/config.py",
    free("tag_validation", S, "WARN"),
    free("load_universal", B, False),
    free("use_node_local_storage", B, False),
    free("parallel_write", _SEC),
    free("checkpoint_serialization", B, True),
    free("writer", _SEC, optional=True),
)
PARALLEL_WRITE = section("checkpoint.parallel_write", Mode.PLAIN, "runtime/config.py", free("pipeline_stage", B, False))
WRITER = section("checkpoint.writer", Mode.OPEN, "runtime/model_checkpointing/config.py")
DATASTATES = section("datastates_ckpt", Mode.OPEN, "datastates/config.py")
AUTOTUNING = section("autotuning", Mode.OPEN, "runtime/config.py")

MONITORING = (
    COMMS_LOGGER,
    TENSORBOARD,
    CSV_MONITOR,
    WANDB,
    COMET,
    TIMERS,
    THROUGHPUT,
    FLOPS_PROFILER,
    CHECKPOINT,
    PARALLEL_WRITE,
    WRITER,
    AUTOTUNING,
    DATASTATES,
)
