"""The file of ``accelerate launch``, for DeepSpeed (naming a ds_config), for FSDP2, and to start ranks and nothing else.

Source: accelerate 1.15 ``commands/config/config_args.py`` and ``utils/dataclasses.py``. Beside a ``deepspeed_config_file``
accelerate refuses what that file decides (precision, accumulation, clipping, stage, offload), so none of it is written.
"""

from __future__ import annotations

from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Compilation, DType, Workload
from zeroplan.core.zero_config import ZeroConfig


def accelerate_deepspeed(zero: ZeroConfig, cluster: Cluster, config_file: str) -> dict[str, Any]:
    """Return the object that runs the ds_config in `config_file`."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": {
            "deepspeed_config_file": config_file,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": zero.stage == 3,
        },
        "distributed_type": "DEEPSPEED",
        **_machines(cluster),
    }


def accelerate_fsdp2(zero: ZeroConfig, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """The object that shards each block by FSDP2. The batch's split is not accelerate's to say."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_activation_checkpointing": workload.gradient_checkpointing,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": bool(zero.offloads_param),
            "fsdp_reshard_after_forward": zero.stage == 3,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_version": 2,
        },
        "mixed_precision": "no" if workload.numerics.dtype is DType.FP32 else workload.numerics.dtype.value,
        **_dynamo(workload),
        **_machines(cluster),
    }


def _dynamo(workload: Workload) -> dict[str, Any]:
    """What accelerate compiles as it prepares the model: repeated blocks one by one, around their checkpoints, or all of it.

    Source: accelerate 1.15 ``accelerator.py``, ``_prepare_fsdp2``.

    Raises:
        BadInput: blocks compiled within their checkpoints.
    """
    if workload.compile is None:
        return {}
    if workload.compile is Compilation.BLOCKS and workload.gradient_checkpointing:
        raise BadInput(
            "accelerate compiles blocks with their checkpoints within",
            where="--compile blocks",
            remedy="use --compile checkpointed-blocks, or --form torch",
        )
    regional = workload.compile is not Compilation.MODEL
    return {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": regional}}


def accelerate_ranks(cluster: Cluster) -> dict[str, Any]:
    """The object that starts the ranks of a program that does the rest itself."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if cluster.layout.world_size > 1 else "NO",
        "mixed_precision": "no",
        **_machines(cluster),
    }


def _machines(cluster: Cluster) -> dict[str, Any]:
    return {
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": cluster.nodes,
        "num_processes": cluster.layout.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
