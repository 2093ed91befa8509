"""Configs, each with the finding that decides it (None where DeepSpeed runs it as it is)."""

from __future__ import annotations

import random
from typing import Any

Config = dict[str, Any]
ADAMW: Config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
TORCH_ADAM: Config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
BF16: Config = {"bf16": {"enabled": True}}
FP16: Config = {"fp16": {"enabled": True}}
ONE: Config = {"train_batch_size": 1}
CPU: Config = {"offload_optimizer": {"device": "cpu"}}
NVME: Config = {"offload_optimizer": {"device": "nvme"}}


def zero(stage: Any, **knobs: Any) -> Config:
    return {"zero_optimization": {"stage": stage, **knobs}}


def job(*parts: Config) -> Config:
    """A bf16 AdamW job of batch 1 with the parts laid over."""
    merged: Config = {}
    for part in (ONE, ADAMW, BF16, *parts):
        merged |= part
    return merged


def optimizer(kind: Any, **params: Any) -> Config:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3} | params}}


def auto_ep(**keys: Any) -> Config:
    return {"expert_parallel": {"enabled": True, "autoep_size": 1} | keys}


CASES: dict[str, tuple[Config, str | None]] = {
    # what runs
    "stage 0 bf16": (job(), None),
    "stage 0 fp16": (job({"bf16": {}}, FP16), None),
    "stage 0 fp32": (job({"bf16": {}}), None),
    "stage 0 torch adam": (job(TORCH_ADAM), None),
    "stage 0 sgd": (job(optimizer("SGD")), None),
    "stage 1": (job(zero(1)), None),
    "stage 1 fp32 accumulation": (job(zero(1), {"data_types": {"grad_accum_dtype": "fp32"}}), None),
    "stage 1 fp32 accumulation, cpu": (job(zero(1, **CPU), {"data_types": {"grad_accum_dtype": "fp32"}}), None),
    "stage 1 fp32 accumulation, nvme": (job(zero(1, **NVME), {"data_types": {"grad_accum_dtype": "fp32"}}), None),
    "stage 2": (job(zero(2)), None),
    "stage 2 cpu": (job(zero(2, **CPU)), None),
    "stage 2 nvme is cpu": (job(zero(2, **NVME)), None),
    "stage 2 param offload ignored": (job(zero(2, offload_param={"device": "cpu"})), None),
    "stage 2 floats": (job(zero(2, reduce_bucket_size=2e8, allgather_bucket_size=2e8)), None),
    "stage 2 numeric strings": (job(zero("2", reduce_bucket_size="200000000")), None),
    "stage 2 fp16": (job(zero(2), {"bf16": {}}, FP16), None),
    "stage 3": (job(zero(3)), None),
    "stage 3 cpu": (job(zero(3, **CPU, offload_param={"device": "cpu"})), None),
    "stage 3 bare names": (job(zero(3, prefetch_bucket_size=7, max_live_parameters=9)), None),
    "stage 3 prefixed names": (job(zero(3, stage3_prefetch_bucket_size=7, stage3_max_live_parameters=9)), None),
    "stage 3 ratio": (job(zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})), None),
    "stage 3 muon": (job(zero(3, reduce_scatter=False), optimizer("Muon")), None),
    "boolean zero": (job({"zero_optimization": True}), None),
    "boolean zero off": (job({"zero_optimization": False}), None),
    "deprecated cpu_offload": (job(zero(2, cpu_offload=True)), None),
    "auto in blocks": (job(zero("auto", reduce_bucket_size="auto", overlap_comm="auto")), None),
    "unknown top level": (job({"zero": {"stage": 3}, "made_up": 1}), None),
    "lion": (job(zero(2), optimizer("Lion")), None),
    "adagrad": (job(zero(2), optimizer("Adagrad")), None),
    "sgd allowed": (job(zero(2), optimizer("SGD"), {"zero_allow_untested_optimizer": True}), None),
    "bf16 masters and states": (
        job(zero(2), {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
        None,
    ),
    "bf16 masters on cpu": (job(zero(3, **CPU), {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}), None),
    "no norm": (job(zero(2, compute_grad_norm=False), {"gradient_clipping": 0}), None),
    "stage 1 prescale": (job(zero(1), {"prescale_gradients": True}), None),
    "stage 2 prescale without reduce_scatter": (job(zero(2, reduce_scatter=False), {"prescale_gradients": True}), None),
    "old bfloat16": ({**ONE, **ADAMW, "bfloat16": {"enabled": True}, **zero(2)}, None),
    "bf16 null": (job({"bf16": None}, zero(2)), None),
    "activation checkpointing, unknown key": (job({"activation_checkpointing": {"made_up": 1}}), None),
    "scheduler": (job(zero(2), {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}), None),
    "checkpoint tag": (job({"checkpoint": {"tag_validation": "Ignore"}}), None),
    "communication dtype": (job(zero(2), {"communication_data_type": "FP32"}), None),
    "autocast": (job(zero(2), {"bf16": {}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}), None),
    # what the parser refuses
    "no batch": ({**ADAMW, **BF16}, "batch.missing"),
    "batch auto": (job({"train_batch_size": "auto"}), "auto.rejected"),
    "batch zero": (job({"train_batch_size": 0}), "batch.positive"),
    "batch mismatch": (job({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}), None),  # 2 × 2 × 1
    "batch impossible": (job({"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2}), "batch.arithmetic"),
    "batch all three": (
        job({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}),
        "batch.arithmetic",
    ),
    "fp16 and bf16": (job(FP16), "precision.both"),
    "stage 4": (job(zero(4)), "value.type"),
    "stage null": (job(zero(None)), "value.type"),
    "unknown zero key": (job(zero(2, reduce_bucket=1)), "key.unknown"),
    "unknown offload key": (job(zero(2, offload_optimizer={"device": "cpu", "pinned": True})), "key.unknown"),
    "unknown bf16 key": (job({"bf16": {"enabled": True, "loss_scale": 1}}), "key.unknown"),
    "placeholder device": (job(zero(3, offload_param={"device": "[cpu|nvme]"})), "value.type"),
    "offload as string": (job(zero(2, offload_optimizer="cpu")), "value.type"),
    "fractional bucket": (job(zero(2, reduce_bucket_size=0.9)), "value.type"),
    "zero bucket": (job(zero(2, reduce_bucket_size=0)), "value.range"),
    "scientific string": (job(zero(2, reduce_bucket_size="2e8")), "value.type"),
    "both spellings": (job(zero(3, prefetch_bucket_size=1, stage3_prefetch_bucket_size=2)), "key.twice"),
    "deprecated beside new": (job(zero(2, cpu_offload=True, **CPU)), "key.replaced"),
    "ratio below stage 3": (job(zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5})), "offload.ratio"),
    "no norm at stage 3": (job(zero(3, compute_grad_norm=False)), "norm.stage"),
    "sum at stage 3": (job(zero(3), {"gradient_allreduce_op": "sum"}), "reduce.sum"),
    "strange reduction": (job({"gradient_allreduce_op": "avg"}), "reduce.op"),
    "strange communication dtype": (job({"communication_data_type": "fp8"}), "value.type"),
    "masters at stage 0": (job({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}), "masters.stage"),
    "states without masters": (job(zero(2), {"bf16": {"enabled": True, "bf16_optimizer_states": True}}), "masters.states"),
    "negative loss scale": (job({"bf16": {}}, {"fp16": {"enabled": True, "loss_scale": -1}}), "value.type"),
    "loss scale window 0": (job({"bf16": {}}, {"fp16": {"enabled": True, "loss_scale_window": 0}}), "fp16.window"),
    "removed amp": (job({"amp": {"enabled": False}}), "key.removed"),
    "removed mics": (job(zero(3, mics_shard_size=8)), "key.removed"),
    "optimizer null": (job({"optimizer": None}), "value.type"),
    "zero as list": (job({"zero_optimization": []}), "value.type"),
    "fp16 null": (job({"fp16": None}), "value.type"),
    "strange tag": (job({"checkpoint": {"tag_validation": "maybe"}}), "checkpoint.tag"),
    "strange autocast": (job({"torch_autocast": {"enabled": True, "dtype": "fp9"}}), "value.type"),
    "zenflow strategy": (job(zero(2, **CPU, zenflow={"select_strategy": "never"})), "zenflow.strategy"),
    "zenflow topk 1": (job(zero(2, **CPU, zenflow={"topk_ratio": 1.0})), "value.range"),
    "wall clock word": (job({"wall_clock_breakdown": "yes"}), "value.type"),
    # what the engine refuses
    "one-bit adam": (job(zero(2), optimizer("OneBitAdam")), "optimizer.one_bit"),
    "one-bit's key for adam": (job(optimizer("AdamW", freeze_step=3)), "optimizer.params"),
    "fused amsgrad": (job(optimizer("AdamW", amsgrad=True)), "optimizer.params"),
    "momentum in words": (job(optimizer("SGD", momentum="abc")), "optimizer.params"),
    "rate in words": (job(zero(2), optimizer("AdamW", lr="1e-4")), "optimizer.params"),
    "made-up optimizer": (job(optimizer("AdamX")), "optimizer.unsupported"),
    "8-bit adam": (job(optimizer("AdamW8bit")), "optimizer.of_runtime"),
    "lower-case sgd": (job(optimizer("sgd")), "optimizer.unsupported"),
    "max_grad_norm": (job(optimizer("AdamW", max_grad_norm=1.0)), "optimizer.max_grad_norm"),
    "sgd untested": (job(zero(2), optimizer("SGD")), "optimizer.untested"),
    "lamb untested": (job(zero(2), optimizer("Lamb")), "optimizer.untested"),
    "lamb static scale": (
        job(optimizer("Lamb"), {"bf16": {}}, {"fp16": {"enabled": True, "loss_scale": 8}}),
        "optimizer.lamb_scale",
    ),
    "muon scatters": (job(zero(3), optimizer("Muon")), "optimizer.muon_reduce_scatter"),
    "stage 0 fp32 accumulation": (job({"data_types": {"grad_accum_dtype": "fp32"}}), "accum.stage0"),
    "strange accumulation dtype": (job({"data_types": {"grad_accum_dtype": "fp9"}}), "value.type"),
    "param dtype differs": (job({"data_types": {"param_dtype": "fp16"}}), "dtype.param"),
    "stage 2 prescale": (job(zero(2), {"prescale_gradients": True}), "scale.reduce_scatter"),
    "stage 3 predivide": (job(zero(3), {"gradient_predivide_factor": 2.0}), "scale.reduce_scatter"),
    "no norm, clipping": (job(zero(2, compute_grad_norm=False)), "norm.with"),
    "legacy stage 1": (job(zero(1, legacy_stage1=True)), "stage1.legacy"),
    "odd gather bucket": (job(zero(2, allgather_bucket_size=7)), "bucket.even"),
    "bf16 masters without offload": (
        job(zero(2), {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
        "masters.offload",
    ),
    "bf16 masters with torch adam": (
        job(zero(3, **CPU), TORCH_ADAM, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
        "masters.offload",
    ),
    "nvme without path": (job(zero(3, **NVME)), "offload.path"),
    "param nvme without path": (job(zero(3, **CPU, offload_param={"device": "nvme"})), "offload.path"),
    "ratio with torch adam": (job(zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}), TORCH_ADAM), "offload.hybrid"),
    "zenflow without offload": (job(zero(2, zenflow={"topk_ratio": 0.2})), "zenflow.offload"),
    "zenflow interval": (job(zero(2, **CPU, zenflow={"select_strategy": "step"})), "zenflow.interval"),
    "zenflow without overlap": (job(zero(2, **CPU, zenflow={"offload": True})), "zenflow.overlap"),
    "quantized autocast": (
        job(zero(3, zero_quantized_weights=True), {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        "autocast.quantized",
    ),
    "unmanaged overlap": (job(zero(1, overlap_comm=True), {"managed_gradient_accumulation": False}), "accumulation.managed"),
    "clipping auto": (job(zero(2), {"gradient_clipping": "auto"}), "auto.rejected"),
    "learning rate auto": (
        job(TORCH_ADAM, {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}),
        "auto.rejected",
    ),
    # AutoEP, whose section is checked whatever the model
    "autoep": (job(zero(2), auto_ep()), None),
    "autoep off": (job(zero(2), auto_ep(enabled=False, expert_tensor_parallel_size=2)), None),
    "autoep expert tp": (job(zero(2), auto_ep(expert_tensor_parallel_size=2)), "autoep.expert_tp"),
    "autoep balance": (job(zero(2), auto_ep(load_balance_coeff=0.01)), "autoep.load_balance"),
    "autoep score": (job(zero(2), auto_ep(score_func="relu")), "autoep.score_func"),
    "autoep backend": (job(zero(2), auto_ep(comm_backend="nccl")), "autoep.comm_backend"),
    "autoep combine": (job(zero(2), auto_ep(combine_impl="sum")), "autoep.combine_impl"),
    "autoep gate": (job(zero(2), auto_ep(gate_up_impl="fused", use_grouped_mm=False)), "autoep.fused_gate"),
    "autoep rows": (job(zero(2), auto_ep(row_weighting_impl="fused")), "autoep.fused_rows"),
    "autoep of no rank": (job(zero(2), auto_ep(autoep_size=0)), "autoep.autoep_size"),
    "autoep in words": (job(zero(2), auto_ep(autoep_size="1")), "autoep.autoep_size"),
    "autoep preset": (job(zero(2), auto_ep(preset_model="llama")), "autoep.preset_model"),
    "autoep preset known": (job(zero(2), auto_ep(preset_model="qwen3_moe", enabled=False)), None),
    "autoep activation": (job(zero(2), auto_ep(expert_activation="gelu")), "autoep.expert_activation"),
    "autoep activation known": (job(zero(2), auto_ep(expert_activation="geglu_tanh", comm_num_sm=1)), None),
    "autoep processors": (job(zero(2), auto_ep(comm_num_sm=0)), "autoep.comm_num_sm"),
    "autoep margin": (job(zero(2), auto_ep(comm_qp_margin=-1)), "autoep.comm_qp_margin"),
    "autoep attribute": (job(zero(2), auto_ep(num_experts_attr="a.b")), "autoep.num_experts_attr"),
    "autoep no matrix": (job(zero(2), auto_ep(expert_w3=None)), None),
    "autoep shared": (job(zero(2), auto_ep(has_shared_experts="yes")), "autoep.has_shared_experts"),
    "autoep scale": (job(zero(2), auto_ep(routed_scaling_factor="large")), "autoep.routed_scaling_factor"),
    "autoep plan": (job(zero(2), auto_ep(async_split_plan=1)), "autoep.async_split_plan"),
    "autoep groups": (job(zero(2), auto_ep(num_expert_groups=2, num_limited_groups=4)), "autoep.limited_groups"),
    "autoep groups of none": (job(zero(2), auto_ep(num_expert_groups=0)), "autoep.limited_groups"),
    "autoep groups known": (job(zero(2), auto_ep(num_expert_groups=4, num_limited_groups=2)), None),
    "autoep deepep": (job(zero(2), auto_ep(comm_backend="deepep")), "autoep.deepep_tokens"),
}


_KNOBS: dict[str, tuple[float, list[Any]]] = {
    "reduce_scatter": (0.25, [False]),
    "overlap_comm": (0.2, [True, False]),
    "contiguous_gradients": (0.1, [False]),
    "allgather_bucket_size": (0.1, [100, 101]),
    "compute_grad_norm": (0.1, [False]),
    "round_robin_gradients": (0.1, [True]),
    "parameter_alignment": (0.1, [True]),
    "legacy_stage1": (0.03, [True]),
    "zero_quantized_weights": (0.05, [True]),
    "zero_quantized_gradients": (0.05, [True]),
    "sub_group_size": (0.1, [10, 10**6]),
    "stage3_allgather_sequential": (0.1, [True]),
}
_TOP: dict[str, tuple[float, list[Any]]] = {
    "train_micro_batch_size_per_gpu": (0.3, [1, 2]),
    "gradient_accumulation_steps": (0.3, [1, 2, 4]),
    "zero_allow_untested_optimizer": (0.6, [True]),
    "gradient_clipping": (0.3, [0, 1.0]),
    "prescale_gradients": (0.1, [True]),
    "gradient_predivide_factor": (0.05, [2.0]),
    "gradient_allreduce_op": (0.1, ["sum", "mean"]),
    "communication_data_type": (0.1, ["fp32", "bf16"]),
    "managed_gradient_accumulation": (0.08, [False]),
    "data_types": (0.25, [{"grad_accum_dtype": dtype} for dtype in ("fp32", "bf16", "fp16")]),
}
_OPTIMIZERS = ["Adam", "AdamW", "AdamW", "AdamW", "SGD", "Adagrad", "Lamb", "Lion", "Muon", "RMSprop", "Adafactor", "adam"]


def _some(draw: random.Random, knobs: dict[str, tuple[float, list[Any]]]) -> Config:
    return {name: draw.choice(values) for name, (chance, values) in knobs.items() if draw.random() < chance}


def random_config(draw: random.Random) -> Config:
    """A plausible config, about a quarter of which run."""
    config: Config = {"train_batch_size": draw.choice([1, 1, 1, 4])} | _some(draw, _TOP)
    precision = draw.choice(["bf16", "bf16", "bf16", "fp16", "torch_autocast", "none"])
    half = {"enabled": True}
    if precision == "bf16":
        half |= _some(draw, {"bf16_master_weights_and_grads": (0.25, [True]), "bf16_optimizer_states": (0.2, [True])})
    elif precision == "fp16":
        half |= _some(draw, {"fp16_master_weights_and_grads": (0.2, [True]), "loss_scale": (0.2, [0, 128])})
    elif precision == "torch_autocast":
        half |= {"dtype": "bfloat16"}
    if precision != "none":
        config[precision] = half
    kind = draw.choice(_OPTIMIZERS)
    torch_adam = kind.lower() in ("adam", "adamw") and draw.random() < 0.2
    config |= optimizer(kind, torch_adam=True) if torch_adam else optimizer(kind)
    knobs = _some(draw, _KNOBS)
    if draw.random() < 0.4:
        device = draw.choice(["cpu", "cpu", "none", "nvme"])
        knobs["offload_optimizer"] = {"device": device} | _some(draw, {"ratio": (0.15, [0.5]), "pin_memory": (0.2, [False])})
    if draw.random() < 0.25:
        knobs["offload_param"] = {"device": draw.choice(["cpu", "none", "nvme"])}
    if draw.random() < 0.1:
        choices = {"select_strategy": (0.4, ["step"]), "select_interval": (0.4, [4]), "update_interval": (0.4, [2, 8])}
        knobs["zenflow"] = {"topk_ratio": 0.3} | _some(
            draw, choices | {"offload": (0.3, [True]), "overlap_step": (0.2, [True])}
        )
    return config | zero(draw.choice([0, 1, 1, 2, 2, 3, 3]), **knobs)
