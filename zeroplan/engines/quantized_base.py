"""A quantised base under an engine that shards: its weights as they are stored, and what the engine does not shard.

Note [Quantised bases that are sharded]
    bitsandbytes keeps a weight's 4-bit values in one column of another dtype: of bytes, or with ``bnb_4bit_quant_storage`` of
    16-bit numbers. To FSDP and to ZeRO this column is a frozen parameter like any other: it is sharded, gathered and freed in
    quantised form. Its scales are attributes of the layer, and lie whole on every rank. FSDP flattens and shards floats alone:
    FSDP 1 refuses bytes, and accelerate leaves them out of FSDP 2's units. DeepSpeed partitions either. GPTQ's and AWQ's
    integers are buffers, which nothing shards.
    ``from_pretrained`` quantises on each rank's own GPU, also where stage 3 would have made the model under ``zero.Init``: the
    whole quantised model is there before anything is sharded.
    What is not quantised is in 16 bits: FSDP 1 flattens one dtype a unit, and DeepSpeed casts the module.
    Source: bitsandbytes 0.50 (``quantize_4bit``, ``fix_4bit_weight_quant_state_from_module``); accelerate 1.15,
    ``utils/fsdp_utils.py`` (``fsdp2_prepare_model``); torch 2.13, ``fsdp/_flat_param.py`` (``_validate_tensors_to_flatten``);
    transformers 5.17, ``modeling_utils.py`` (``get_init_context``), ``quantizers/quantizer_bnb_4bit.py``
    (``update_device_map``).
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroplan.core.errors import BadInput
from zeroplan.core.parameters import Parameters
from zeroplan.core.quantization import PackedWeights, Quantization
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Workload


def kernels_of(packed: PackedWeights, key: str) -> tuple[Unmodelled, ...]:
    """Return what a plan over GPTQ's, AWQ's or torchao's weights assumes of the kernel that trains."""
    if packed.method == "torchao":
        says = "torchao's int8 weights, whose copies in 16 bits stay for the backward: held to its own code, measured on no GPU"
        return (Unmodelled(key, Effect.UNKNOWN, says),)
    says = (
        f"{packed.method}'s weights as gptqmodel's torch kernel multiplies by them, which keeps each whole in 16 bits for the "
        "backward; Triton's kernel does not, and what a compiler leaves of the unpacked integers is in no figure"
    )
    return (Unmodelled(key, Effect.UNKNOWN, says),)


#: Threads in which transformers 5.17 reads tensors (``core_model_loading.py``, GLOBAL_WORKERS).
_READERS = 4


def read_at_once(numel: Sequence[int]) -> int:
    """Return the host bytes in which 16-bit weights wait on their way to the GPU that quantises them.

    Each is read by itself out of a file that is mapped, whose pages the kernel takes back; each thread holds one.
    """
    return 2 * sum(sorted(numel)[-_READERS:])


#: The stage below 3 under which 4-bit bases were measured (B07 and B10 in benchmarks/ground_truth/tasks.jsonl).
_MEASURED = 2


def unmeasured_base(workload: Workload, stage: int) -> tuple[Unmodelled, ...]:
    """Return that no measured run tells of a quantised base under a stage of DeepSpeed's; nothing elsewhere."""
    if workload.quantize is None or stage == 3 or (stage == _MEASURED and workload.quantize is not Quantization.INT8):
        return ()
    says = f"no GPU has measured this quantised base under DeepSpeed's stage {stage}"
    return (Unmodelled(workload.quantized_by, Effect.MORE, says),)


def packed_kernels(workload: Workload) -> tuple[Unmodelled, ...]:
    """Return :func:`kernels_of` for GPTQ's and AWQ's weights; nothing for others."""
    return kernels_of(workload.quantize, workload.quantized_by) if isinstance(workload.quantize, PackedWeights) else ()


def stored(parameters: Parameters, workload: Workload) -> Parameters:
    """Return the parameters as an engine that shards sees them: quantised weights in the shape in which they are stored."""
    if workload.quantize is None or not parameters.packed:
        return parameters
    return parameters.stored(workload.quantize.stored_shape)


def require_stored(workload: Workload, engine: str) -> None:
    """Refuse a quantised base in a format, or beside an arithmetic, in which the engine does not shard it.

    Raises:
        BadInput: int8, whose layers keep the whole weight beside the parameter, or fp32, which no 4-bit column is kept in.
    """
    if workload.quantize is Quantization.INT8:
        raise BadInput(
            f"{engine} cannot shard int8 weights, of which each layer keeps the whole beside its parameter",
            where=workload.quantized_by,
            remedy="use nf4, or --engine ddp",
        )
    if workload.quantize is not None and workload.numerics.dtype.bytes != 2:
        raise BadInput(
            f"a quantised base is sharded in 16 bits, not in {workload.numerics.dtype}",
            where="--dtype",
            remedy="use --dtype bf16",
        )
