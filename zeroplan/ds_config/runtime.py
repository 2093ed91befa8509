"""The step from a ds_config to the setup of zeroplan's runtime; the plan and the run both take it here."""

from __future__ import annotations

from zeroplan.core.arena.layout_setup import Feature, RuntimeSetup
from zeroplan.core.quantize_training import QuantizeTraining
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.runtime_options import RuntimeOptions


def runtime_setup(
    zero: ZeroConfig,
    runtime_options: RuntimeOptions,
    *,
    ranks: int,
    dtype: DType,
    optimizer: str,
    grad_accum: int,
    quantize_training: QuantizeTraining | None = None,
    local_steps: bool = False,
    ep: int = 1,
    across: int = 1,
) -> RuntimeSetup:
    """Return what decides the runtime's own buffers beside the shapes.

    Gradients are reduced in ``communication_data_type``, by default the model's dtype, and accumulated in
    ``data_types.grad_accum_dtype``, by default the dtype of the reduction.

    Args:
        zero: stage, offload and dtypes of gradients.
        runtime_options: the runtime's own keys.
        ranks: data-parallel ranks.
        dtype: of the model's parameters.
        optimizer: by the name of its row of states.
        grad_accum: micro batches a step.
        quantize_training: the section of that name; None without it.
        local_steps: the optimizer lets ranks step alone.
        ep: the ranks that share a block's experts.
        across: those of `ep` that see the same tokens.

    Raises:
        BadInput: a stage that does not exist, counts below their least, or an optimizer that the runtime does not have.
    """
    reduce = zero.step.communication_data_type or dtype
    states, params = zero.offload_optimizer, zero.offload_param
    features = {
        Feature.LOCAL_STEPS: local_steps,
        Feature.FLOAT8_GATHERS: runtime_options.float8_gathers,
        Feature.COPY_ENGINES: runtime_options.copy_engine_gathers,
        Feature.ASYNC_CHECKPOINTS: runtime_options.async_checkpoints,
        Feature.DELAYED_UPDATE: runtime_options.delayed_update > 0,
    }
    return RuntimeSetup(
        ranks=ranks,
        ep=ep,
        across=across,
        stage=zero.stage,
        param_dtype=dtype,
        reduce_dtype=reduce,
        accum_dtype=zero.step.grad_accum_dtype or reduce,
        optimizer=optimizer,
        grad_accum=grad_accum,
        block_slots=runtime_options.ring,
        offload_optimizer=states.device,
        offload_ratio=states.ratio,
        swap_buffers=states.buffer_count,
        offload_param=params.device,
        param_buffers=params.buffer_count,
        param_buffer_numel=params.buffer_size,
        params_in_host=params.max_in_cpu,
        quantize_training=quantize_training,
        bf16_layers=runtime_options.bf16_layers,
        features=frozenset(feature for feature, is_on in features.items() if is_on),
    )
