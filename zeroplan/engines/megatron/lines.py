"""Megatron-LM's ledger: contiguous buffers of parameters and gradients, fp32 masters and Adam's states.

Source: Megatron-Core 0.16.1, ``megatron/core/distributed/param_and_grad_buffer.py``, ``megatron/core/optimizer``.
"""

from __future__ import annotations

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.engines.megatron.rank import MegatronRank
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.ledger.optimizer_lines import add_state_lines, add_workspace_line

_lines = LedgerBuilder()
_add = _lines.add


@_add(Buffer.PARAM_FULL, Place.HBM, ALWAYS, state=True)
def param_full(c: MegatronRank) -> int:
    """This rank's parameters, never gathered or freed; under the distributed optimizer in one padded buffer a chunk.

    Source: megatron/core/distributed/param_and_grad_buffer.py, _ParamAndGradBuffer
    """
    return c.param_bytes


@_add(Buffer.PARAM_FROZEN, Place.HBM, ALWAYS, state=True)
def param_frozen(c: MegatronRank) -> int:
    """Parameters without gradient, in no buffer.

    Source: distributed_data_parallel.py, DistributedDataParallel (buffers take what requires a gradient)
    """
    return c.element * c.frozen_numel


@_add(Buffer.GRAD_ACCUM, Place.HBM, ALWAYS, state=True)
def grad_buffer(c: MegatronRank) -> int:
    """All gradients of this rank's parameters, in fp32 unless they are reduced in 16 bits, for the whole run.

    Source: megatron/core/distributed/param_and_grad_buffer.py, _ParamAndGradBuffer
    """
    return c.grad_element * c.buffered


@_add(Buffer.PARAM_MASTER, Place.HBM, ALWAYS, state=True)
def param_master(c: MegatronRank) -> int:
    """Fp32 masters: of this rank's part under the distributed optimizer, else of all.

    Source: megatron/core/optimizer/distrib_optimizer.py, _build_model_and_main_param_groups
    """
    return 4 * c.masters


add_state_lines(_lines, Place.HBM, lambda c: c.stepped)


@_add(Buffer.GRAD_MASTER, Place.HBM, (Phase.STEP,))
def grad_copies(c: MegatronRank) -> int:
    """Gradients in fp32 for the step, where the buffer holds them in 16 bits.

    Source: megatron/core/optimizer/distrib_optimizer.py, _copy_model_grads_to_main_grads
    """
    return 4 * c.grad_copies


@_add(Buffer.PARAM_FULL, Place.HBM, FROM_FIRST_STEP)
def quantized_weights(c: MegatronRank) -> int:
    """Matrices in 8 bits, by rows and by columns, which each step writes anew; where they are in 8 bits themselves, transposed.

    Source: transformer_engine/pytorch/module/base.py, quantize_weight
    """
    return c.quantized_bytes


@_add(Buffer.MODEL_BUFFER, Place.HBM, FROM_FIRST_STEP)
def amax_history(c: MegatronRank) -> int:
    """The largest elements of earlier steps, by which delayed scaling scales.

    Source: transformer_engine/pytorch/quantization.py, DelayedScalingRecipeState
    """
    return c.history_bytes


@_add(Buffer.COMM_ALL_GATHER, Place.HBM, FROM_FIRST_STEP)
def shared_buffer(c: MegatronRank) -> int:
    """What Megatron's own layers gather under sequence parallelism, and unfused attention's scores: one buffer, kept.

    Source: megatron/core/utils.py, GlobalMemoryBuffer
    """
    return c.shared_bytes


@_add(Buffer.GRAD_FULL, Place.HBM, FROM_FIRST_STEP)
def stand_ins(c: MegatronRank) -> int:
    """What TransformerEngine returns for a weight's gradient that its product has added to the buffer already: one a shape.

    Source: transformer_engine/pytorch/module/base.py, get_dummy_wgrad
    """
    return c.stand_in_bytes


@_add(Buffer.MODEL_BUFFER, Place.HBM, FROM_FIRST_STEP)
def rotary(c: MegatronRank) -> int:
    """Angles of rotary positions, which are cached. Source: megatron/core/models/common/embeddings/rotary_pos_embedding.py"""
    return c.rotary_bytes


@_add(Buffer.MODEL_BUFFER, Place.HBM, FROM_FIRST_STEP)
def dispatchers(c: MegatronRank) -> int:
    """Probabilities and maps of tokens and experts, which each layer's dispatcher holds until the next micro batch.

    Source: megatron/core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher
    """
    return c.dispatcher_bytes


@_add(Buffer.WORKSPACE, Place.HBM, FROM_FIRST_STEP)
def engine_workspace(c: MegatronRank) -> int:
    """TransformerEngine's workspace for matrix products.

    Source: transformer_engine/pytorch/cpp_extensions/gemm.py, get_cublas_workspace_size_bytes
    """
    return c.engine_workspace


add_workspace_line(_lines)


LEDGER = _lines.ledger()
