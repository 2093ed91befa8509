"""One rank of a job, as every engine sees it: the model's parameters, the workload, and how many ranks share them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zeroplan.core.optimizer_row import Optimizer
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters
from zeroplan.core.workload import Workload
from zeroplan.ledger.line import means


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank. The first line of a cached property's docstring is what ``explain`` says of its name.

    Attributes:
        workload: what is computed.
        parameters: the model's parameters. Other attributes name one of them by its index here.
        layout: how the ranks divide the work.
        cublas_workspace: bytes of one cuBLAS workspace; 0 without a GPU.
    """

    workload: Workload
    parameters: Parameters
    layout: ParallelLayout
    cublas_workspace: int = means("bytes of one cuBLAS workspace on this GPU", default=0)

    @cached_property
    def optimizer(self) -> Optimizer:
        """The row of the optimizer table."""
        return find_optimizer(self.workload.numerics.optimizer)

    @property
    def decay_lists(self) -> int:
        """Lists of gradients with their weight decay that torch's multi-tensor loops make."""
        return self.optimizer.decay_lists if self.workload.numerics.decays else 0

    @property
    def factored(self) -> int | None:
        """Elements of factored second moments; None where flat parts leave nothing to factor."""
        return None

    @property
    def state_scales(self) -> int | None:
        """Bytes of the scales of 8-bit states; None where they follow from the elements."""
        return None

    @property
    def whole_states(self) -> int:
        """Elements whose states an 8-bit optimizer keeps in fp32."""
        return 0

    @cached_property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.layout.shard_group

    @property
    def grad_accum(self) -> int:
        """Micro batches a step."""
        return self.workload.batch.grad_accum

    @cached_property
    def numel(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return self.parameters.numel

    @cached_property
    def quant_states(self) -> tuple[int, ...]:
        """Bytes of each block that scales a quantised base's stored weights: attributes of layers, whole on every rank."""
        quantize, weights = self.workload.quantize, self.parameters.weights
        if quantize is None or not weights:
            return ()
        shared = (quantize.shared_bytes,) if quantize.shared_bytes else ()
        return (*shared, *(nbytes for p in self.parameters.packed for nbytes in quantize.states_of_weight(weights[p])))

    @cached_property
    def quant_states_bytes(self) -> int:
        """Bytes of the scales of a quantised base's weights, and of the tables of their levels."""
        return sum(self.quant_states)

    @cached_property
    def params(self) -> int:
        """Elements of the whole model."""
        return self.parameters.total

    @cached_property
    def trainable(self) -> int:
        """Elements that receive a gradient."""
        return self.parameters.trained_total

    @cached_property
    def frozen(self) -> int:
        """Elements without gradient."""
        return self.params - self.trainable
