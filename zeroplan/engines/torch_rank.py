"""One rank of a job under FSDP2 or DDP: what it holds of every parameter, derived once for the ledger and the schedules.

Counts are elements, and ``bytes`` in a name means bytes an element, unless a docstring says otherwise.

Note [Muon of FSDP2 and DDP]
    ``torch.optim.Muon`` takes 2-D parameters alone and is meant for hidden layers, so a program makes two optimizers: Muon for
    the matrices of the blocks, AdamW for the embeddings, the head and all vectors. Which parameter goes where is the program's
    choice; planned is the usual one, of the example in torch's and in the original's documentation.
    Source: torch/optim/_muon.py; Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.optimizer_row import LEVELS, Domain, factors_of
from zeroplan.core.workload import DType, Precision
from zeroplan.engines.rank import Rank
from zeroplan.techniques.freeze import FrozenParts
from zeroplan.techniques.synced_passes import SyncedPasses

if TYPE_CHECKING:
    from zeroplan.core.saving import Saving
    from zeroplan.engines.saved_files import Written
    from zeroplan.engines.simulation import HostPhase

_IN_A_BLOCK = re.compile(r"(^|\.)\d+\.")


def muon_takes(name: str, dimensions: int) -> bool:
    """Return whether Muon updates a parameter: a matrix of a block (a numbered module) that is no embedding.

    Args:
        name: in full, such as ``model.layers.0.mlp.up_proj.weight``.
        dimensions: of its shape.
    """
    return dimensions == 2 and _IN_A_BLOCK.search(name) is not None and "embed" not in name.lower()


@dataclass(frozen=True, kw_only=True)
class TorchRank(Rank, ABC):
    """Rank 0, which holds the most, and what it holds."""

    @cached_property
    def original_bytes(self) -> int:
        """Bytes of one trained parameter, as the optimizer sees it."""
        work = self.workload
        if work.quantize is not None and work.adapter_bytes is not None:
            return work.adapter_bytes
        frozen = work.technique(FrozenParts)
        alike = all(self.parameters.trainable) if frozen is None else not frozen.half
        trains_all = work.lora_rank is None and alike  # a live module may come with its adapters
        half = work.numerics.precision is Precision.PURE or (work.numerics.precision is Precision.HALF_AUTOCAST and trains_all)
        return work.numerics.dtype.bytes if half else DType.FP32.bytes

    @cached_property
    def frozen_bytes(self) -> int:
        """Bytes of one frozen parameter."""
        half = self.workload.numerics.precision in (Precision.PURE, Precision.HALF_AUTOCAST)
        return self.workload.numerics.dtype.bytes if half else DType.FP32.bytes

    def width(self, param: int) -> int:
        """Bytes an element of one parameter where it is kept, unless it is quantised."""
        return self.original_bytes if self.parameters.trainable[param] else self.frozen_bytes

    def kept(self, param: int) -> tuple[int, ...]:
        """Bytes of the blocks in which one whole parameter is kept: one, or a quantised weight's values and scales."""
        quantize = self.workload.quantize
        if quantize is not None and self.parameters.quantized[param]:
            return quantize.blocks_of_weight(self.parameters.shapes[param])
        return (self.width(param) * self.numel[param],)

    @cached_property
    def quantized(self) -> int:
        """Elements of the base that are quantised."""
        return sum(self.numel[p] for p in self.parameters.packed)

    @cached_property
    def quantized_bytes(self) -> int:
        """Bytes of those, with their scales and what all layers share."""
        packed, quantize = self.parameters.packed, self.workload.quantize
        if quantize is None or not packed:
            return 0
        return sum(sum(quantize.blocks_of_weight(self.parameters.shapes[p])) for p in packed) + quantize.shared_bytes

    @cached_property
    def frozen_whole(self) -> int:
        """Elements without gradient that are not quantised."""
        return self.frozen - self.quantized

    @property
    def plain(self) -> bool:
        """Whether parameters are whole tensors; FSDP's are shards."""
        return False

    @cached_property
    @abstractmethod
    def chunks(self) -> tuple[int, ...]:
        """Elements of each parameter that this rank's optimizer holds."""

    @cached_property
    def sharded_trainable(self) -> int:
        """Elements of this rank's chunks of trained parameters."""
        return sum(self.chunks[p] for p in self.parameters.trained)

    @cached_property
    def largest_trained(self) -> int:
        """Elements of this rank's chunk of the largest trained parameter."""
        return max((self.chunks[p] for p in self.parameters.trained), default=0)

    @property
    def trained(self) -> tuple[int, ...]:
        """The parameters that receive a gradient."""
        return self.parameters.reached

    @property
    def leaves_whole_gradients(self) -> bool:
        """Whether the micro batches before a step's last one leave theirs unreduced."""
        return self.grad_accum > 1 and not self.workload.has(SyncedPasses)

    @cached_property
    def reached(self) -> int:
        """Elements of the parameters that a micro batch gives a gradient; torch's optimizers make no states for others."""
        return sum(self.numel[p] for p in self.trained)

    @property
    def graded(self) -> int:
        """Elements of gradients: those of all trained parameters, unless some get none."""
        return self.reached if self.parameters.unreached else self.trainable

    # --- the optimizer ----------------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of one element of an optimizer state."""
        return self.original_bytes

    @cached_property
    def matrices(self) -> frozenset[int]:
        """The trained parameters that Muon would update, whatever the optimizer is."""
        names, shapes = self.parameters.names, self.parameters.shapes
        return frozenset(p for p in self.trained if muon_takes(names[p], len(shapes[p])))

    @cached_property
    def matrix(self) -> int:
        """This rank's elements that Muon updates: the matrices of the blocks."""
        return sum(self.chunks[p] for p in self.matrices)

    @cached_property
    def rest(self) -> int:
        """This rank's elements that Muon leaves to AdamW: embeddings, head, vectors."""
        return sum(self.chunks[p] for p in self.trained) - self.matrix

    def stepped(self) -> list[tuple[Domain, int]]:
        """The trained parameters in the order in which they are stepped, each with its domain: Muon's matrices come first."""
        if not self.optimizer.rest:
            return [(Domain.ALL, p) for p in self.trained]
        updated = [(Domain.MATRIX, p) for p in self.trained if p in self.matrices]
        return updated + [(Domain.REST, p) for p in self.trained if p not in self.matrices]

    def whole_states_of(self, param: int) -> int:
        """Return the bytes of one parameter's optimizer states on all ranks together."""
        matrix = self.optimizer.rest and param in self.matrices
        domain = Domain.ALL if not self.optimizer.rest else Domain.MATRIX if matrix else Domain.REST
        own = [state for state in self.optimizer.states if state.domain is domain]
        shape = self.parameters.shapes[param]
        return sum(nbytes for state in own for nbytes in state.tensors_of(shape, self.original_bytes))

    @cached_property
    def factored(self) -> int:
        """Elements of this rank's factored second moments: of a matrix its rows and its columns."""
        return sum(sum(factors_of(self.stepped_shape(p))) for p in self.trained)

    @cached_property
    def state_scales(self) -> int:
        """Bytes of the scales of 8-bit states, a whole one for each begun block, and of the two maps of 8-bit numbers."""
        if not self.optimizer.least_8bit:
            return 0
        narrow = [p for p in self.trained if not self.keeps_whole_states(p)]
        scales = sum(nbytes for p in narrow for kind, nbytes in self.states(Domain.ALL, p) if kind is Buffer.OPTIM_SCALE)
        return scales + (2 * LEVELS if narrow else 0)

    @cached_property
    def whole_states(self) -> int:
        """Elements whose states an 8-bit optimizer keeps in fp32: small parameters, and registered embeddings."""
        return sum(self.chunks[p] for p in self.trained if self.keeps_whole_states(p))

    def host_phases(self) -> tuple[HostPhase, ...]:
        """Return the rank's buffers on the host by phase; none unless the engine offloads."""
        return ()

    def parts_of_save(self, saving: Saving) -> tuple[Written, ...]:
        """Return the host's bytes while the model is written, and then the optimizer's states, where that is modelled."""
        return ()

    def states_on_host(self) -> dict[tuple[Buffer, Place], int]:
        """Return the bytes of the optimizer's states where they are offloaded."""
        found: dict[tuple[Buffer, Place], int] = {}
        for domain, p in self.stepped():
            for buffer, nbytes in self.states(domain, p):
                found[buffer, Place.DRAM] = found.get((buffer, Place.DRAM), 0) + nbytes
        return found

    def stepped_shape(self, param: int) -> tuple[int, ...]:
        """Return the shape in which the optimizer sees this rank's part of a parameter."""
        whole = self.parameters.shapes[param]
        return whole if self.chunks[param] == self.numel[param] else (self.chunks[param],)

    def keeps_whole_states(self, param: int) -> bool:
        """Return whether an 8-bit optimizer keeps the parameter's states in fp32.

        Source: bitsandbytes 0.50, optim/optimizer.py (Optimizer2State.init_state); transformers 5.17, trainer.py
        (create_optimizer), which registers each ``nn.Embedding``
        """
        least, embeddings = self.optimizer.least_8bit, self.parameters.embeddings
        registered = self.workload.numerics.whole_embedding_states and bool(embeddings) and embeddings[param]
        return bool(least) and (self.chunks[param] < least or registered)

    def states(self, domain: Domain, param: int) -> list[tuple[Buffer, int]]:
        """Return the buffers and bytes of the tensors of one parameter's optimizer states on this rank."""
        own = [state for state in self.optimizer.states if state.domain is domain]
        if self.keeps_whole_states(param):
            whole = DType.FP32.bytes * self.chunks[param]
            return [(state.buffer, whole) for state in own if state.buffer is not Buffer.OPTIM_SCALE]
        shape, width = self.stepped_shape(param), self.original_bytes
        return [(state.buffer, nbytes) for state in own for nbytes in state.tensors_of(shape, width)]
