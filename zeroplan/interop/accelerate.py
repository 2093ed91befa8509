"""accelerate's YAML, written: for DeepSpeed (pointing at a ds_config) and for FSDP2.

Source: accelerate 1.x ``commands/config/config_args.py`` and ``utils/dataclasses.py``. Beside a ``deepspeed_config_file``
accelerate refuses what that file decides (precision, accumulation, clipping, stage, offload), so none of it is written.
"""

from __future__ import annotations

from typing import Any

from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import ZeroConfig


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
