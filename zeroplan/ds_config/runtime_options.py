"""The ``zeroplan`` section of a ds_config: the included runtime's own keys."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.arena.layout import WIDE_NUMEL
from zeroplan.core.float8 import Bf16Layers, Float8Recipe, parse_recipe

#: The key of 8-bit products.
FLOAT8 = "zeroplan.float8"


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """The ``zeroplan`` section. Types and bounds of its keys stand in :mod:`.sections_runtime`.

    Attributes:
        ring: slots that blocks take turns in, for parameters at stage 3 and for gradients at stages 2 and 3.
        wide_numel: an embedding or head of at least this many elements becomes a unit of its own.
        direct_linear: linear layers write their weight gradients straight into the flat buffers.
        fused_loss: the loss of a causal language model is computed without an fp32 copy of the logits.
        labelled_tokens_only: the head and the loss of a causal or masked language model see the labelled tokens alone.
        chunked_cross_entropy: tokens whose logits exist at a time, where the head and the loss of a causal language model are
            computed together; 0 for all logits at once.
        float8: the recipe by which linear layers of the blocks multiply in 8-bit floats; empty for 16 bits.
        float8_gathers: blocks' matrices are gathered in 8 bits at stage 3.
        num_layers_at_start_in_bf16: first blocks that multiply, and are gathered, in bf16 all the same.
        num_layers_at_end_in_bf16: last blocks that do.
        copy_engine_gathers: at stage 3 NCCL gathers by the copy engines of a host's GPUs, not by kernels.
        async_checkpoints: checkpoints are copied to pinned memory and written while training goes on.
        audit_steps: in the first this many micro batches at stage 3, the runtime checks that every use of a parameter is
            within the forward of its unit.
        timeout: seconds without progress after which a rank names the rank that it waits for, and ends.
        delayed_update: the first step whose update on the host runs beside the next forward and backward; 0 for never.
        nvme_in_memory: accept an ``nvme_path`` that lies on a file system in host memory.
    """

    ring: int = 2
    wide_numel: int = WIDE_NUMEL
    direct_linear: bool = True
    fused_loss: bool = True
    labelled_tokens_only: bool = False
    chunked_cross_entropy: int = 0
    float8: str = ""
    float8_gathers: bool = False
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    copy_engine_gathers: bool = False
    async_checkpoints: bool = False
    audit_steps: int = 1
    timeout: float = 600.0
    delayed_update: int = 0
    nvme_in_memory: bool = False

    @property
    def float8_recipe(self) -> Float8Recipe | None:
        """How linear layers multiply in 8-bit floats; None in 16 bits. Raises BadInput: an unknown name."""
        return parse_recipe(self.float8, FLOAT8) if self.float8 else None

    @property
    def bf16_layers(self) -> Bf16Layers | None:
        """Which blocks stay in bf16; None for none."""
        found = Bf16Layers(self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16)
        return found if found.at_start or found.at_end else None
