"""Every byte has a name: the three enums that the ledger, the schedules, the Arena and the reports all use.

A :class:`Buffer` says *what* the bytes are, a :class:`Place` *where* they are, a :class:`Phase` *when* they live.
The line that predicts a buffer, the allocation that makes it and the row that measures it carry the same name.
"""

from __future__ import annotations

from enum import StrEnum


class Buffer(StrEnum):
    """Kinds of bytes in GPU, host or disk memory. The value is the name shown to users."""

    # Parameters
    PARAM_REFERENCE = "param.reference"  # a frozen model that preference training asks beside the trained one
    PARAM_FULL = "param.full"  # whole, in the model's dtype, on every rank (stages 0-2), or gathered (stage 3)
    PARAM_SHARD = "param.shard"  # this rank's part, in the model's dtype (stage 3)
    PARAM_PERSISTENT = "param.persistent"  # small parameters that stage 3 keeps gathered
    PARAM_FROZEN = "param.frozen"  # parameters without gradient
    PARAM_MASTER = "param.master"  # the optimizer's own copy, usually fp32
    PARAM_SECONDARY = "param.secondary"  # hpZ's second shard, within a node
    PARAM_TEMP = "param.temp"  # where weights are rounded to fewer bits

    # Gradients
    GRAD_FULL = "grad.full"  # whole, one per parameter, as the backward makes it
    GRAD_SHARD = "grad.shard"  # this rank's averaged part
    GRAD_ACCUM = "grad.accum"  # kept across micro batches
    GRAD_MASTER = "grad.master"  # in the master's dtype, as the optimizer reads it

    # Optimizer states
    OPTIM_EXP_AVG = "optim.exp_avg"
    OPTIM_EXP_AVG_SQ = "optim.exp_avg_sq"
    OPTIM_EXP_AVG_SQ_FRESH = "optim.exp_avg_sq_fresh"
    OPTIM_MOMENTUM = "optim.momentum"
    OPTIM_SUM = "optim.sum"
    OPTIM_MAX_EXP_AVG_SQ = "optim.max_exp_avg_sq"
    OPTIM_AVERAGE = "optim.average"
    OPTIM_PREVIOUS_GRAD = "optim.previous_grad"
    OPTIM_STEP_SIZE = "optim.step_size"
    OPTIM_FACTORED = "optim.factored"
    OPTIM_SCALE = "optim.scale"
    OPTIM_ERROR_FEEDBACK = "optim.error_feedback"  # what a rank's compressed momentum left out
    OPTIM_SERVER_ERROR = "optim.server_error"  # what the compressed mean of a rank's part left out
    OPTIM_ANCHOR = "optim.anchor"  # the masters of the last step after which all ranks had the same (local steps)
    OPTIM_TRUST = "optim.trust"  # norms of whole tensors for LAMB's trust ratio, and the tiles that they are summed over
    OPTIM_TEMP = "optim.temp"  # temporaries of one optimizer step
    OPTIM_NORM = "optim.norm"  # temporaries of the gradient norm and the overflow check

    # Communication and staging
    COMM_ALL_GATHER = "comm.all_gather"
    COMM_REDUCE_SCATTER = "comm.reduce_scatter"
    COMM_ALL_REDUCE = "comm.all_reduce"
    COMM_BUCKET = "comm.bucket"  # gradients collected before a reduction
    COMM_BROADCAST = "comm.broadcast"
    COMM_PIPELINE = "comm.pipeline"  # what a pipeline stage receives: inputs, and gradients of its outputs
    COMM_ACTIVATION = "comm.activation"  # outputs of the model's own collectives, between tensor-parallel ranks
    STAGE_H2D = "stage.h2d"
    STAGE_D2H = "stage.d2h"
    SWAP_BUFFER = "swap.buffer"  # pinned buffers between disk and GPU

    # The model's own computation
    ACTIVATION = "activation"
    ACTIVATION_CHECKPOINT = "activation.checkpoint"
    ACTIVATION_TEMP = "activation.temp"
    LOGITS = "logits"
    MODEL_BUFFER = "model.buffer"  # registered buffers, such as rotary frequencies
    INPUT = "input"
    WORKSPACE = "workspace"  # cuBLAS and cuBLASLt

    # Around torch
    INIT_TEMP = "init.temp"
    CONTEXT = "device.context"
    NCCL = "device.nccl"
    ROLLOUT = "device.rollout"  # another engine that generates on the same GPU
    HOST_PROCESS = "host.process"  # interpreter, libraries and what they map
    HOST_MODEL = "host.model"  # weights in host memory while loading
    HOST_CHECKPOINT = "host.checkpoint"  # what of a checkpoint is in host memory while it is written or read
    FRAGMENTATION = "allocator.fragmentation"
    UNATTRIBUTED = "unattributed"


class Place(StrEnum):
    """Memories that bytes can lie in."""

    HBM = "hbm"
    PINNED = "pinned"
    DRAM = "dram"
    NVME = "nvme"


class Phase(StrEnum):
    """Phases of a run in which bytes are alive."""

    LOAD = "load"
    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    EVALUATION = "evaluation"  # between two steps
    GENERATION = "generation"  # of completions, before a step
    SAVE = "save"
    RESUME = "resume"  # a checkpoint is loaded, between initialisation and the first forward
    WEIGHTS = "weights"  # in place of LOAD: pretrained weights are read into host memory


#: Lives from initialisation to the end of the run.
ALWAYS: tuple[Phase, ...] = (Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
#: Lives from the first optimizer step to the end of the run.
FROM_FIRST_STEP: tuple[Phase, ...] = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
