"""Buffers by the names that people use when they talk about memory: gradients, optimizer states, activations."""

from __future__ import annotations

from enum import StrEnum

from zeroplan.core.buffers import Buffer


class Family(StrEnum):
    """Groups of buffers. The value is the name shown to users."""

    PARAMETERS = "parameters"
    GATHERED = "gathered parameters"
    MASTERS = "master weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATIONS = "activations"
    LOSS = "logits and loss"
    COMMUNICATION = "communication"
    STAGING = "offload staging"
    STEP = "step temporaries"
    WORKSPACES = "workspaces"
    INITIALISATION = "initialisation"
    OTHER = "other"


_FAMILIES: dict[Buffer, Family] = {
    Buffer.PARAM_FULL: Family.PARAMETERS,
    Buffer.PARAM_REFERENCE: Family.PARAMETERS,
    Buffer.PARAM_SHARD: Family.PARAMETERS,
    Buffer.PARAM_PERSISTENT: Family.PARAMETERS,
    Buffer.PARAM_FROZEN: Family.PARAMETERS,
    Buffer.PARAM_SECONDARY: Family.PARAMETERS,
    Buffer.MODEL_BUFFER: Family.PARAMETERS,
    Buffer.PARAM_MASTER: Family.MASTERS,
    Buffer.GRAD_FULL: Family.GRADIENTS,
    Buffer.GRAD_SHARD: Family.GRADIENTS,
    Buffer.GRAD_ACCUM: Family.GRADIENTS,
    Buffer.GRAD_MASTER: Family.GRADIENTS,
    Buffer.OPTIM_EXP_AVG: Family.OPTIMIZER,
    Buffer.OPTIM_EXP_AVG_SQ: Family.OPTIMIZER,
    Buffer.OPTIM_MOMENTUM: Family.OPTIMIZER,
    Buffer.OPTIM_SUM: Family.OPTIMIZER,
    Buffer.OPTIM_EXP_AVG_SQ_FRESH: Family.OPTIMIZER,
    Buffer.OPTIM_MAX_EXP_AVG_SQ: Family.OPTIMIZER,
    Buffer.OPTIM_AVERAGE: Family.OPTIMIZER,
    Buffer.OPTIM_PREVIOUS_GRAD: Family.OPTIMIZER,
    Buffer.OPTIM_STEP_SIZE: Family.OPTIMIZER,
    Buffer.OPTIM_FACTORED: Family.OPTIMIZER,
    Buffer.OPTIM_SCALE: Family.OPTIMIZER,
    Buffer.OPTIM_ERROR_FEEDBACK: Family.OPTIMIZER,
    Buffer.OPTIM_SERVER_ERROR: Family.OPTIMIZER,
    Buffer.OPTIM_ANCHOR: Family.OPTIMIZER,
    Buffer.OPTIM_TRUST: Family.STEP,
    Buffer.PARAM_TEMP: Family.STEP,
    Buffer.OPTIM_TEMP: Family.STEP,
    Buffer.OPTIM_NORM: Family.STEP,
    Buffer.COMM_ALL_GATHER: Family.COMMUNICATION,
    Buffer.COMM_REDUCE_SCATTER: Family.COMMUNICATION,
    Buffer.COMM_ALL_REDUCE: Family.COMMUNICATION,
    Buffer.COMM_BUCKET: Family.COMMUNICATION,
    Buffer.COMM_BROADCAST: Family.COMMUNICATION,
    Buffer.COMM_ACTIVATION: Family.COMMUNICATION,
    Buffer.COMM_PIPELINE: Family.COMMUNICATION,
    Buffer.STAGE_H2D: Family.STAGING,
    Buffer.STAGE_D2H: Family.STAGING,
    Buffer.SWAP_BUFFER: Family.STAGING,
    Buffer.ACTIVATION: Family.ACTIVATIONS,
    Buffer.ACTIVATION_CHECKPOINT: Family.ACTIVATIONS,
    Buffer.ACTIVATION_TEMP: Family.ACTIVATIONS,
    Buffer.INPUT: Family.ACTIVATIONS,
    Buffer.LOGITS: Family.LOSS,
    Buffer.WORKSPACE: Family.WORKSPACES,
    Buffer.INIT_TEMP: Family.INITIALISATION,
}


def family_of(buffer: Buffer, *, sharded: bool = False) -> Family:
    """Return the family that a buffer on the GPU belongs to.

    Args:
        buffer: what the bytes are.
        sharded: whether parameters are sharded (stage 3), so that whole ones are gathered ones.
    """
    if sharded and buffer is Buffer.PARAM_FULL:
        return Family.GATHERED
    return _FAMILIES.get(buffer, Family.OTHER)
