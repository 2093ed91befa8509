"""accelerate's YAML: written for DeepSpeed (pointing at a ds_config) and for FSDP2, and read back.

Source: accelerate 1.x ``commands/config/config_args.py`` and ``utils/dataclasses.py``. Beside a ``deepspeed_config_file``
accelerate refuses what that file decides (precision, accumulation, clipping, stage, offload), so none of it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.interop.setups import Keys, Setup


def _machines(gpus: int, nodes: int) -> dict[str, Any]:
    return {
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": nodes,
        "num_processes": gpus * nodes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def accelerate_deepspeed(zero: ZeroConfig, *, gpus: int, nodes: int, config_file: str) -> dict[str, Any]:
    """The YAML's object that runs the ds_config in `config_file`."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": {
            "deepspeed_config_file": config_file,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": zero.stage == 3,
        },
        "distributed_type": "DEEPSPEED",
        **_machines(gpus, nodes),
    }


def accelerate_fsdp2(
    workload: Workload, *, gpus: int, nodes: int, reshard: bool = True, offload: bool = False
) -> dict[str, Any]:
    """The YAML's object that shards each block by FSDP2.

    `reshard` frees gathered parameters after the forward (stage 3), else they stay (stage 2). `offload` keeps shards on the
    host. The batch split is the program's own.
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_activation_checkpointing": workload.gradient_checkpointing,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": offload,
            "fsdp_reshard_after_forward": reshard,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_version": 2,
        },
        "mixed_precision": "no" if workload.dtype is DType.FP32 else workload.dtype.value,
        **_machines(gpus, nodes),
    }


def read_accelerate(data: Mapping[str, Any], name: str) -> Setup:
    """The run that an accelerate YAML describes, as far as it does: batches and the model are the program's own.

    Raises:
        BadInput: values of wrong types, or a ds_config file that is not there.
    """
    keys = Keys(data, name)
    kind = (keys.text("distributed_type") or "NO").upper()
    nodes = keys.number("num_machines", 1) or 1
    processes = keys.number("num_processes", 1) or 1
    if processes % nodes:
        raise BadInput(
            f"{processes} processes do not divide by {nodes} machines",
            where=f"{name}: num_processes",
            remedy=f"write {-(-processes // nodes) * nodes}, all machines' together",
        )
    common: dict[str, Any] = {"kind": "accelerate", "nodes": nodes, "gpus": processes // nodes}
    mode = keys.text("mixed_precision")
    dtype = mode if mode in ("bf16", "fp16") else None
    if kind == "DEEPSPEED":
        block = keys.mapping("deepspeed_config")
        config = block.ds_config("deepspeed_config_file")
        if config is None:
            config = _plugin_config(block, dtype)
        return Setup(engine="deepspeed", ds_config=config, dtype=dtype, **common)
    if kind == "FSDP":
        block = keys.mapping("fsdp_config")
        notes = () if block.number("fsdp_version", 1) == 2 else ("FSDP 1 is counted as FSDP 2",)
        if block.flag("fsdp_offload_params", False):
            notes = (*notes, "FSDP's offload is not modelled: plans keep shards on the GPU")
        again = block.flag("fsdp_activation_checkpointing", False)
        return Setup(engine="fsdp2", dtype=dtype or "fp32", gradient_checkpointing=again, notes=notes, **common)
    return Setup(engine="ddp", dtype=dtype or "fp32", **common)


def _plugin_config(block: Keys, dtype: str | None) -> dict[str, Any]:
    """What accelerate makes of its own keys. Source: ``DeepSpeedPlugin.__post_init__``."""
    zero: dict[str, Any] = {"stage": block.number("zero_stage", 2, least=0)}
    for ours, theirs in (("offload_optimizer", "offload_optimizer_device"), ("offload_param", "offload_param_device")):
        device = block.text(theirs)
        if device not in (None, "none"):
            zero[ours] = {"device": device}
            path = block.text(f"{ours}_nvme_path")
            if path not in (None, "none"):
                zero[ours]["nvme_path"] = path
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "gradient_accumulation_steps": block.number("gradient_accumulation_steps", 1),
        "train_micro_batch_size_per_gpu": "auto",
    }
    if dtype is not None:
        config[dtype] = {"enabled": True}
    clipping = block.data.get("gradient_clipping")
    if isinstance(clipping, int | float) and not isinstance(clipping, bool):
        config["gradient_clipping"] = clipping
    return config
