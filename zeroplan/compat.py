"""DeepSpeed's memory estimators by their own names and arguments, with ours beside the figures they print.

A script that imports from ``deepspeed.runtime.zero.stage3`` or ``stage_1_and_2`` runs unchanged with
``from zeroplan.compat import …``. It needs no DeepSpeed, and a model on the meta device is counted right.
"""

from __future__ import annotations

from typing import Any

from zeroplan.core.sizes import GIB
from zeroplan.ledger.deepspeed_estimator import HOST_FACTOR, PeerEstimate, estimate_zero2, estimate_zero3


def estimate_zero2_model_states_mem_needs_all_live(
    model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = HOST_FACTOR
) -> None:
    """Print what stage 2 needs for a live ``nn.Module`` (or anything else that names a model), with and without offload."""
    total, _ = _count(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = HOST_FACTOR
) -> None:
    """Print what stage 2 needs for so many parameters, with and without offload."""
    total_params = int(total_params)
    _heading(f"{total_params // 10**6}M total params", num_gpus_per_node, num_nodes)
    for offload in (True, False):
        peer = estimate_zero2(
            total_params,
            gpus=num_gpus_per_node,
            nodes=num_nodes,
            offload_optimizer=offload,
            factor=additional_buffer_factor,
        )
        ours = _ours(total_params, None, 2, num_gpus_per_node, num_nodes, offload, False)
        _row(peer, ours, f"offload_optimizer={_device(offload)}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = HOST_FACTOR
) -> None:
    """Print what stage 3 needs for a live ``nn.Module`` (or anything else that names a model), for each offload."""
    total, largest = _count(model)
    estimate_zero3_model_states_mem_needs_all_cold(total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = HOST_FACTOR,
) -> None:
    """Print what stage 3 needs for so many parameters, for each offload, with and without ``zero.Init``."""
    total_params, largest_layer_params = int(total_params), int(largest_layer_params)
    what = f"{total_params // 10**6}M total params, {largest_layer_params // 10**6}M largest layer params"
    _heading(what, num_gpus_per_node, num_nodes)
    for offload, offload_param in ((True, True), (True, False), (False, False)):
        ours = _ours(total_params, largest_layer_params, 3, num_gpus_per_node, num_nodes, offload, offload_param)
        for zero_init in (True, False):
            peer = estimate_zero3(
                total_params,
                largest_layer_params,
                gpus=num_gpus_per_node,
                nodes=num_nodes,
                offload_optimizer=offload,
                offload_param=offload_param,
                zero_init=zero_init,
                factor=additional_buffer_factor,
            )
            options = f"offload_param={_device(offload_param)}, offload_optimizer={_device(offload)}, zero_init={zero_init:d}"
            _row(peer, ours, options)


def _count(model: Any) -> tuple[int, int]:
    """Count all parameters, shared ones once, and the largest module's own."""
    from zeroplan.models.facts import largest_module_params
    from zeroplan.models.load import load_model

    spec = load_model(model)
    return spec.params, largest_module_params(spec) or 0


def _ours(
    params: int, largest: int | None, stage: int, gpus: int, nodes: int, offload: bool, offload_param: bool
) -> PeerEstimate:
    from zeroplan.api import estimate

    (plan,) = estimate(
        params=params,
        largest_layer_params=largest,
        gpus=gpus,
        nodes=nodes,
        stage=stage,
        offload_optimizer=_device(offload).strip(),
        offload_param=_device(offload_param).strip(),
        depth="formula",
    )
    return PeerEstimate(plan.gpu.needed, plan.cpu.per_node)


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"


def _heading(what: str, gpus: int, nodes: int) -> None:
    print(f"Model states and DeepSpeed's fixed buffers, without activations: {what}, {nodes} × {gpus} GPUs (GiB).")
    print(f"{'zeroplan':^19}|{'DeepSpeed says':^19}|")
    print(" per CPU |  per GPU | per CPU |  per GPU | Options")


def _row(peer: PeerEstimate, ours: PeerEstimate, options: str) -> None:
    figures = (ours.cpu, ours.gpu, peer.cpu, peer.gpu)
    print(" | ".join(f"{figure / GIB:8.2f}" for figure in figures) + f" | {options}")
