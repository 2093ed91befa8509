"""Sections on monitoring, profiling and checkpoints. None of their keys has an effect on memory."""

from __future__ import annotations

from zeroplan.ds_config.coercion import ValueKind
from zeroplan.ds_config.schema import BOOL, FLOAT, HONOURED, INT, STR, Mode, free, section

_SEC = ValueKind.SECTION

COMMS_LOGGER = section(
    "comms_logger",
    Mode.MODEL,
    "comm/config.py",
    free("enabled", BOOL, False),
    free("prof_all", BOOL, True),
    free("prof_ops", ValueKind.LIST, []),
    free("verbose", BOOL, False),
    free("debug", BOOL, False),
)

TENSORBOARD, CSV_MONITOR = (
    section(
        path,
        Mode.MODEL,
        "monitor/config.py",
        free("enabled", BOOL, False, runtime=HONOURED),
        free("output_path", STR, "", runtime=HONOURED),
        free("job_name", STR, "DeepSpeedJobName", runtime=HONOURED),
    )
    for path in ("tensorboard", "csv_monitor")
)

WANDB = section(
    "wandb",
    Mode.MODEL,
    "monitor/config.py",
    free("enabled", BOOL, False, runtime=HONOURED),
    free("group", STR, optional=True, runtime=HONOURED),
    free("team", STR, optional=True, runtime=HONOURED),
    free("project", STR, "deepspeed", runtime=HONOURED),
)

COMET = section(
    "comet",
    Mode.MODEL,
    "monitor/config.py",
    free("enabled", BOOL, False),
    free("samples_log_interval", INT, 100),
    *(free(name, STR, optional=True) for name in ("project", "workspace", "api_key")),
    *(free(name, STR, optional=True) for name in ("experiment_name", "experiment_key", "mode")),
    free("online", BOOL, optional=True),
)

TIMERS = section("timers", Mode.PLAIN, "utils/config.py", free("throughput", _SEC))
THROUGHPUT = section(
    "timers.throughput", Mode.MODEL, "utils/config.py", free("enabled", BOOL, True), free("synchronized", BOOL, True)
)

FLOPS_PROFILER = section(
    "flops_profiler",
    Mode.PLAIN,
    "profiling/config.py",
    free("enabled", BOOL, False, runtime=HONOURED),
    free("recompute_fwd_factor", FLOAT, 0.0),
    free("profile_step", INT, 1, runtime=HONOURED),
    free("module_depth", INT, -1),
    free("top_modules", INT, 1),
    free("detailed", BOOL, True),
    free("output_file", STR, optional=True, runtime=HONOURED),
)

CHECKPOINT = section(
    "checkpoint",
    Mode.PLAIN,
    "runtime/config.py, runtime/model_checkpointing/config.py",
    free("tag_validation", STR, "WARN"),
    free("load_universal", BOOL, False),
    free("use_node_local_storage", BOOL, False),
    free("parallel_write", _SEC),
    free("checkpoint_serialization", BOOL, True),
    free("writer", _SEC, optional=True),
)
PARALLEL_WRITE = section("checkpoint.parallel_write", Mode.PLAIN, "runtime/config.py", free("pipeline_stage", BOOL, False))
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
