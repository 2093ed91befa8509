"""Sections on compilation, other kinds of parallelism, and quantization: they move memory, and no plan models them."""

from __future__ import annotations

from zeroplan.ds_config.coercion import ValueKind
from zeroplan.ds_config.schema import BOOL, INT, STR, Mode, other, section

_SEC = ValueKind.SECTION

HYBRID_ENGINE = section(
    "hybrid_engine",
    Mode.MODEL,
    "runtime/config.py",
    other("enabled", BOOL, False),
    other("max_out_tokens", INT, 512, above=0),
    other("inference_tp_size", INT, 1),
    other("release_inference_cache", BOOL, False),
    other("pin_parameters", BOOL, True),
    other("tp_gather_partition_size", INT, 8),
    other("enable_cuda_graph", BOOL, False),
)

COMPILE = section(
    "compile",
    Mode.MODEL,
    "compile/config.py",
    *(other(name, BOOL, False) for name in ("deepcompile", "autoep_non_moe", "free_activation", "offload_activation")),
    other("free_activation_threshold", INT, 10 << 20),
    other("offload_activation_pin_memory", BOOL, True),
    *(other(name, BOOL, False) for name in ("offload_opt_states", "symmetric_memory", "debug_log", "offload_parameters")),
    other("double_buffer", BOOL, True),
    *(other(name, BOOL, False) for name in ("sync_before_reduce", "sync_after_reduce")),
    *(other(name, BOOL, False) for name in ("sync_before_allgather", "sync_after_allgather")),
    other("keep_int_input_tensors", BOOL, True),
    other("keep_all_input_tensors", BOOL, False),
    other("passes", ValueKind.LIST, optional=True, note="z1, z3, autosp, autotp"),
)

TENSOR_PARALLEL = section(
    "tensor_parallel",
    Mode.MODEL,
    "runtime/tensor_parallel/config.py",
    other("dtype", ValueKind.ANY),
    other("autotp_size", INT, 0),
    other("tp_overlap_comm", BOOL, False),
    other("vocab_parallel_lm_head", BOOL, optional=True),
    other("vocab_parallel_ce_backend", STR, "torch"),
    other("tensor_parallel", _SEC, alias="tp"),
    other("injection_policy_tuple", ValueKind.ANY, optional=True),
    other("partition_config", _SEC, optional=True),
    other("preset_model", STR, optional=True),
    other("keep_module_on_host", BOOL, False),
    other("replace_with_kernel_inject", BOOL, False, alias="kernel_inject"),
)

_ANY = ValueKind.ANY  # DeepSpeed's parser takes values as they are, and the engine checks them (rules_autoep.py)

EXPERT_PARALLEL = section(
    "expert_parallel",
    Mode.PLAIN,
    "module_inject/auto_ep_config.py",
    *(
        other(name, _ANY, default)
        for name, default in (("enabled", False), ("autoep_size", 1), ("expert_tensor_parallel_size", 1))
    ),
    *(other(name, _ANY, False) for name in ("validate_folding_routing", "async_split_plan", "disable_triton_grouped_mm")),
    other("use_grouped_mm", _ANY, True),
    *(other(name, _ANY, "auto") for name in ("score_apply", "combine_impl", "row_weighting_impl", "score_func", "top_k")),
    other("gate_up_impl", _ANY, "separate"),
    other("comm_backend", _ANY, "comm"),
    other("comm_num_sm", _ANY, 12),
    other("comm_qp_margin", _ANY, 4),
    other("comm_max_tokens_per_rank", _ANY, 0),
    other("route_scale", _ANY, 1.0),
    other("routed_scaling_factor", _ANY, "auto"),
    *(
        other(name, _ANY, optional=True)
        for name in (
            *("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "route_norm", "num_expert_groups"),
            *("num_limited_groups", "load_balance_coeff", "expert_w1", "expert_w2", "expert_w3", "num_experts_attr"),
            *("top_k_attr", "has_shared_experts", "shared_experts_pattern", "shared_experts_gate_pattern", "expert_activation"),
        )
    ),
)

WEIGHT_QUANTIZATION = section(
    "weight_quantization",
    Mode.MODEL,
    "inference/config.py",
    other("enabled", BOOL, True),
    other("num_bits", INT, 8),
    other("q_type", STR, "symmetric"),
    other("q_groups", INT, 1),
    other("quantized_initialization", _SEC),
    other("post_init_quant", _SEC),
)

DATA_EFFICIENCY = section("data_efficiency", Mode.OPEN, "runtime/config.py")
PIPELINE = section("pipeline", Mode.OPEN, "runtime/config.py")

PARALLEL = (HYBRID_ENGINE, COMPILE, TENSOR_PARALLEL, EXPERT_PARALLEL, WEIGHT_QUANTIZATION, DATA_EFFICIENCY, PIPELINE)
