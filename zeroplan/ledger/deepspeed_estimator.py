"""DeepSpeed's own estimator by its own formulas, to show beside ours. It counts model states alone.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py, ``estimate_zero*_model_states_mem_needs``.
Its documentation still prints examples of an older stage-2 formula; :data:`OLD` gives those.
"""

from __future__ import annotations

from dataclasses import dataclass

#: DeepSpeed's factor on host memory.
HOST_FACTOR = 1.5
CURRENT = "0.19.8"
#: The last version whose stage 2 counted 4 + 16 / N bytes a parameter; its documentation's examples are from then.
OLD = "0.9"


@dataclass(frozen=True, slots=True)
class PeerEstimate:
    """Bytes per GPU and per node's host memory."""

    gpu: int
    cpu: int


def estimate_zero2(
    params: int,
    *,
    gpus: int = 1,
    nodes: int = 1,
    offload_optimizer: bool = True,
    factor: float = HOST_FACTOR,
    version: str = CURRENT,
) -> PeerEstimate:
    """Return DeepSpeed's figures for stage 2: 2P + 18P/N on the GPU, or 2P with the optimizer offloaded.

    Args:
        params: elements of the whole model.
        gpus: GPUs a node.
        offload_optimizer: whether the optimizer is on the host.
        factor: DeepSpeed's additional_buffer_factor.
        version: :data:`CURRENT` or :data:`OLD`.
    """
    ranks = gpus * nodes
    if offload_optimizer:
        return PeerEstimate(2 * params, int(params * max(4 * ranks, 16) * factor))
    gpu = 4 * params + int(16 * params / ranks) if version == OLD else 2 * params + int(18 * params / ranks)
    return PeerEstimate(gpu, int(params * 4 * gpus * factor))


def estimate_zero3(
    params: int,
    largest_layer: int,
    *,
    gpus: int = 1,
    nodes: int = 1,
    offload_optimizer: bool = True,
    offload_param: bool = True,
    zero_init: bool = True,
    factor: float = HOST_FACTOR,
) -> PeerEstimate:
    """Return DeepSpeed's figures for stage 3: the largest layer twice, and the shards.

    Args:
        params: elements of the whole model.
        largest_layer: elements of the largest module's own parameters.
        gpus: GPUs a node.
        offload_optimizer: whether the optimizer is on the host.
        offload_param: whether the parameters are too.
        zero_init: whether the model is built under ``deepspeed.zero.Init``.
        factor: DeepSpeed's additional_buffer_factor.
    """
    ranks, layer, share = gpus * nodes, 4 * largest_layer, 1 / nodes
    if not offload_optimizer:
        gpu = layer + int(18 * params / ranks)
        return PeerEstimate(gpu, int((largest_layer if zero_init else params) * 4 * gpus * factor))
    width = 18 if offload_param else 16
    gpu = layer if offload_param else layer + int(2 * params / ranks)
    cpu = params * (width * share if zero_init else max(4 * gpus, width * share)) * factor
    return PeerEstimate(gpu, int(cpu))
