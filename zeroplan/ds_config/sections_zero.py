"""``zero_optimization`` and the sections in it.

The runtime ignores keys that choose between DeepSpeed's own ways of doing the same (buckets, prefetching, persistence), and
refuses those that would change what is computed or stored.
"""

from __future__ import annotations

from zeroplan.core.zero_config import LeafModule, OffloadOptimizer, OffloadParam, ZenFlow, ZeroConfig
from zeroplan.ds_config.coercion import ValueKind
from zeroplan.ds_config.schema import BOOL, FLOAT, HONOURED, INT, REFUSED, STR, Mode, free, mem, other, section

ZERO = section(
    "zero_optimization",
    Mode.MODEL,
    "runtime/zero/config.py",
    mem("stage", ValueKind.STAGE, runtime=HONOURED),
    mem("contiguous_gradients", BOOL),
    mem("reduce_scatter", BOOL),
    mem("reduce_bucket_size", INT, above=0),
    mem("use_multi_rank_bucket_allreduce", BOOL),
    mem("allgather_partitions", BOOL),
    mem("allgather_bucket_size", INT, lo=0, threshold=True),
    mem("overlap_comm", BOOL, optional=True),
    mem("compute_grad_norm", BOOL, runtime=REFUSED),
    free("load_from_fp32_weights", BOOL, True),
    free("elastic_checkpoint", BOOL, False),
    mem("offload_param", ValueKind.SECTION, optional=True, runtime=HONOURED),
    mem("offload_optimizer", ValueKind.SECTION, optional=True, runtime=HONOURED),
    mem("zenflow", ValueKind.SECTION, optional=True, runtime=REFUSED),
    mem("sub_group_size", INT, lo=0, threshold=True),
    mem("cpu_offload_param", BOOL, "", optional=True, replaced_by="offload_param", runtime=HONOURED),
    free("cpu_offload_use_pin_memory", BOOL, optional=True, replaced_by="offload_param or offload_optimizer"),
    mem("cpu_offload", BOOL, "", optional=True, replaced_by="offload_optimizer", runtime=HONOURED),
    mem("prefetch_bucket_size", INT, alias="stage3_prefetch_bucket_size", lo=0, threshold=True),
    mem("param_persistence_threshold", INT, alias="stage3_param_persistence_threshold", lo=0, threshold=True),
    mem("model_persistence_threshold", INT, alias="stage3_model_persistence_threshold", lo=0, threshold=True),
    mem("max_live_parameters", INT, alias="stage3_max_live_parameters", lo=0, threshold=True),
    mem("max_reuse_distance", INT, alias="stage3_max_reuse_distance", lo=0, threshold=True),
    mem("gather_16bit_weights_on_model_save", BOOL, alias="stage3_gather_16bit_weights_on_model_save"),
    mem("module_granularity_threshold", INT, alias="stage3_module_granularity_threshold", threshold=True),
    mem("use_all_reduce_for_fetch_params", BOOL, alias="stage3_use_all_reduce_for_fetch_params"),
    mem("allgather_sequential", BOOL, alias="stage3_allgather_sequential"),
    mem(
        "stage3_gather_fp16_weights_on_model_save",
        BOOL,
        "",
        default=False,
        replaced_by="gather_16bit_weights_on_model_save",
    ),
    free("ignore_unused_parameters", BOOL, True),
    free("legacy_stage1", BOOL, False),
    mem("round_robin_gradients", BOOL),
    mem("parameter_alignment", BOOL),
    mem("zero_hpz_partition_size", INT, lo=0, runtime=REFUSED),
    other("zero_quantized_weights", BOOL, attr="zero_quantized_weights"),
    other("zero_quantized_nontrainable_weights", BOOL, attr="zero_quantized_nontrainable_weights"),
    other("zero_quantized_gradients", BOOL, attr="zero_quantized_gradients"),
    mem("memory_efficient_linear", BOOL),
    free("pipeline_loading_checkpoint", BOOL, False),
    free("override_module_apply", BOOL, True),
    free("log_trace_cache_warnings", BOOL, False),
    free("enable_sanity_checks", BOOL, False),
    mem("save_muon_momentum_buffer_in_memory", BOOL),
    mem("leaf_module", ValueKind.SECTION),
    holder=ZeroConfig,
)

OFFLOAD_PARAM = section(
    "zero_optimization.offload_param",
    Mode.MODEL,
    "runtime/zero/offload_config.py",
    mem("device", ValueKind.DEVICE, runtime=HONOURED),
    mem("nvme_path", STR, optional=True, runtime=HONOURED),
    mem("buffer_count", INT, lo=0, runtime=HONOURED),
    mem("buffer_size", INT, lo=0, runtime=HONOURED),
    mem("max_in_cpu", INT, lo=0, threshold=True, runtime=HONOURED),
    mem("pin_memory", BOOL),
    holder=OffloadParam,
)

OFFLOAD_OPTIMIZER = section(
    "zero_optimization.offload_optimizer",
    Mode.MODEL,
    "runtime/zero/offload_config.py",
    mem("device", ValueKind.DEVICE, runtime=HONOURED),
    mem("nvme_path", STR, optional=True, runtime=HONOURED),
    mem("buffer_count", INT, lo=0, runtime=HONOURED),
    mem("pin_memory", BOOL),
    mem("pipeline_read", BOOL),
    mem("pipeline_write", BOOL),
    mem("fast_init", BOOL),
    mem("ratio", FLOAT, lo=0.0, hi=1.0, runtime=HONOURED),
    mem("super_offload", BOOL, runtime=REFUSED),
    mem("cpuadam_cores_perc", FLOAT, lo=0.0, hi=1.0, runtime=HONOURED),
    holder=OffloadOptimizer,
)

ZENFLOW = section(
    "zero_optimization.zenflow",
    Mode.MODEL,
    "runtime/zenflow/zenflow_config.py",
    mem("topk_ratio", FLOAT, above=0.0, below=1.0, runtime=REFUSED),
    mem("select_strategy", STR, runtime=REFUSED),
    mem("select_interval", ValueKind.INT_OR_STR, runtime=REFUSED),
    mem("update_interval", ValueKind.INT_OR_STR, runtime=REFUSED),
    mem("overlap_step", BOOL, runtime=REFUSED),
    mem("offload", BOOL, runtime=REFUSED),
    mem("auto_ratio", FLOAT, lo=0.0, hi=1.0, runtime=REFUSED),
    mem("full_warm_up_rounds", INT, runtime=REFUSED),
    mem("pt_reserved_cores_perc", FLOAT, lo=0.0, hi=1.0, runtime=REFUSED),
    free("steps_per_epoch", INT, optional=True, note="set by DeepSpeed itself", runtime=REFUSED),
    holder=ZenFlow,
)

LEAF_MODULE = section(
    "zero_optimization.leaf_module",
    Mode.MODEL,
    "runtime/zero/leaf_module_config.py",
    mem("classes", ValueKind.STRINGS),
    mem("names", ValueKind.STRINGS),
    mem("name_suffixes", ValueKind.STRINGS),
    holder=LeafModule,
)
