"""DeepSpeed's AutoEP: what it refuses, and how stage 3 puts its layers in the place of sharded blocks.

Note [Blocks that AutoEP replaces]
    Below stage 3 blocks are replaced where the model is, which is planned to be the host: of experts, only this rank's reach
    the GPU. Under ``zero.Init`` all experts are made and sharded over all ranks first. Then, one block after another, the
    engine gathers them, cuts this rank's out, and shards those over the ranks that hold the same.

    Sources: DeepSpeed 0.19.8, runtime/engine.py (_configure_expert_parallel, _partition_autoep_zero3_experts);
    module_inject/auto_ep_layer.py (AutoEPMoELayer.__init__); moe/ep_repack.py (_repack_fused_3d).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zeroplan.core.auto_ep import is_auto_ep_router
from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan.engines.case import Case
from zeroplan.engines.deepspeed.moe import LARGEST_GROUP
from zeroplan.engines.deepspeed.rank import DeepSpeedRank

#: The least compute capability whose products are torch's (accelerator/cuda_accelerator.py, prefer_triton_grouped_mm).
_GROUPED_PRODUCTS = (9, 0)


class _Shards(Protocol):
    """What of stage 3's schedule is needed here."""

    rank: DeepSpeedRank
    params: dict[int, int]

    def alloc(self, nbytes: int, buffer: Buffer, *, note: int = -1) -> int: ...

    def free(self, handle: int) -> None: ...

    def make_shard(self, p: int) -> int | None: ...


class ReplacedBlocks:
    """The blocks of transformers while stage 3's model is built, and AutoEP's layers in their place. See Note [Blocks that
    AutoEP replaces].

    Attributes:
        routers: parameters that are whole until the optimizer is made, which shards them.
    """

    def __init__(self, schedule: _Shards) -> None:
        self._on = schedule
        names = schedule.rank.parameters.names
        self.routers = frozenset(p for p, name in enumerate(names) if is_auto_ep_router(name))
        self._layers: list[tuple[int, ...]] = []
        self._shards: dict[int, list[int]] = {}  # by AutoEP's first parameter of a module, those of transformers'

    def build(self, params: Sequence[int]) -> bool:
        """Make and shard what transformers has in the place of a module of AutoEP; returns whether it is one."""
        if params and params[0] in self.routers:
            self._make(params[0], [self._on.rank.numel[params[0]]])
            return True
        if not params or params[0] not in self._on.rank.experts:
            return False
        self._layers.append(tuple(params))
        self._make(params[0], self._sources(params))
        return True

    def _sources(self, params: Sequence[int]) -> list[int]:
        """Return the elements of every rank's matrices of gate and up, which are one, and of down."""
        (w1, w2, _), ep = (self._on.rank.numel[p] for p in params), self._on.rank.layout.ep
        return [2 * w1 * ep, w2 * ep]

    def _make(self, first: int, counts: list[int]) -> None:
        on, w = self._on, self._on.rank.param_bytes
        wholes = [on.alloc(w * count, Buffer.PARAM_FULL) for count in counts]
        for count, whole in zip(counts, wholes, strict=True):
            part = 0 if on.rank.zero.offloads_param else -(-count // on.rank.ranks)
            self._shards.setdefault(first, []).append(on.alloc(w * part, Buffer.INIT_TEMP))
            on.free(whole)

    def replace(self) -> None:
        """Put AutoEP's layer in the place of each block, and shard its experts."""
        on, w = self._on, self._on.rank.param_bytes
        numel = on.rank.numel
        routers = sorted(self.routers)
        for router, layer in zip(routers, self._layers, strict=True):
            gathered = on.alloc(w * numel[router], Buffer.INIT_TEMP)
            on.params[router] = on.alloc(w * numel[router], Buffer.INIT_TEMP)
            on.free(gathered)
            w1, w2, w3 = layer
            wholes = [on.alloc(w * count, Buffer.INIT_TEMP) for count in self._sources(layer)]
            both = on.alloc(2 * w * numel[w1], Buffer.INIT_TEMP)
            several = on.rank.parameters.shapes[w1][0] > 1  # of a single expert, gate and up are views
            cut = [on.alloc(w * numel[p], Buffer.INIT_TEMP) for p in ((w2, w1, w3) if several else (w2,))]
            cut += [] if several else [both]
            for handle in (*wholes, both) if several else wholes:
                on.free(handle)
            own = {p: on.alloc(w * numel[p], Buffer.INIT_TEMP, note=p) for p in layer}
            for handle in cut:
                on.free(handle)
            for p in layer:
                part = on.make_shard(p)
                on.free(own[p])
                if part is not None:
                    on.params[p] = part
            for first in (router, layer[0]):
                for shard in self._shards.pop(first):
                    on.free(shard)


#: Architectures of which runs were measured (benchmarks/mesh/auto_ep.py).
_MEASURED = ("mixtral", "qwen2_moe", "qwen3_moe")


def unmodelled_auto_ep(case: Case, version: str) -> Unmodelled | None:
    """Return what leaves the answer open with AutoEP's layers; None where such runs were measured."""
    if version != DEEPSPEED_VERSION:
        says = f"only {DEEPSPEED_VERSION}'s AutoEP was read"
    elif case.cluster.gpu.capability < _GROUPED_PRODUCTS:
        says = f"on an {case.cluster.gpu.name} the experts' products are Triton's, whose buffers were not read"
    elif case.spec.model_type not in _MEASURED:
        says = f"AutoEP of {case.spec.model_type} is planned as DeepSpeed's source has it; no run was measured"
    elif case.zero.offloads_optimizer or case.zero.offloads_param:
        says = "AutoEP with an offload is planned as DeepSpeed's source has it; no run was measured"
    elif case.zero.stage == 3 and case.layout.ep == 1:
        says = "stage 3 with every rank's own experts is planned as DeepSpeed's source has it; no run was measured"
    else:
        return None
    return Unmodelled("expert_parallel", Effect.UNKNOWN, says)


def require_auto_ep(case: Case) -> None:
    """Refuse what DeepSpeed refuses of AutoEP's layers, and what is not modelled of them.

    Source: runtime/engine.py, _validate_zero3_moe_compatibility; runtime/zero/stage_1_and_2.py, _configure_moe_settings;
    module_inject/auto_ep.py, _resolve_expert_activation
    """
    zero, work, where = case.zero, case.workload, "--ep"
    if zero.stage == 2 and not zero.buckets.contiguous_gradients and not zero.offload_optimizer:
        raise BadInput(
            "contiguous gradients must be set to true for MoE in ZeRO stage 2",
            where="zero_optimization.contiguous_gradients",
            remedy="leave it out",
        )
    if zero.stage in (1, 2) and not zero.buckets.reduce_scatter:
        raise BadInput(
            "reduce scatter must be set to true for MoE", where="zero_optimization.reduce_scatter", remedy="leave it out"
        )
    if zero.stage == 3 and zero.stage3.zero_hpz_partition_size > 1:
        raise BadInput(
            "AutoEP with ZeRO stage 3 has no secondary shards",
            where="zero_optimization.zero_hpz_partition_size",
            remedy="use 1",
        )
    if zero.zenflow is not None:
        raise BadInput("ZenFlow beside AutoEP is not modelled", where="zenflow", remedy="leave it out")
    row = find_optimizer(work.numerics.optimizer)
    if row.rest or row.compresses:
        raise BadInput(f"{work.numerics.optimizer} beside AutoEP is not modelled", where="--optimizer", remedy="use adamw")
    act = case.spec.config.get("hidden_act") or "silu"
    if act != "silu":
        raise BadInput(
            f"AutoEP computes silu(gate) · up, and the model's experts {act}", where="model", remedy="leave --ep at 1"
        )
    parameters = case.parameters
    largest = max((p for p in range(len(parameters)) if parameters.names[p].endswith("experts.w1")), default=None)
    if zero.stage in (1, 2) and largest is not None and parameters.numel[largest] > LARGEST_GROUP:
        raise BadInput(
            f"with ep {case.layout.ep} a rank's {parameters.names[largest]} has {parameters.numel[largest]:,} elements, more"
            f" than the {LARGEST_GROUP:,} of a parameter group of experts, of which DeepSpeed {DEEPSPEED_VERSION} then makes an"
            " empty one that ZeRO cannot partition",
            where=where,
            remedy="raise it, so that a rank has fewer experts",
        )
