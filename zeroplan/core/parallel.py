"""ParallelLayout: how a run divides its work among ranks, and the process groups that follow.

Note [Parallel layout]
    One rank is one process with one GPU. Ranks are numbered as in torchtitan's ParallelDims and Megatron-LM: neighbours in
    rank belong to one tensor-parallel group, then to one context-parallel group, then to one data-parallel group (shards
    first, replicas of the shards after them), and pipeline stages are outermost. Data parallelism is what the other degrees
    leave of nodes × GPUs.

    ZeRO and FSDP shard parameters, gradients and optimizer states over the *shard group*: every rank that holds the same part
    of the model, context-parallel ranks included, since those differ in tokens and not in parameters.

    Experts divide the ranks of a pipeline stage a second time, into ep × etp for the experts and their matrices. What
    remains is the experts' own data parallelism: an expert's parameters have another shard group than the dense ones.

    Sources: torchtitan/distributed/parallel_dims.py (ParallelDims); Megatron-LM, megatron/core/parallel_state.py
    (RankGenerator, initialize_model_parallel).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroplan.core.errors import BadInput

#: The order of a pipeline's micro batches that needs no flag.
DEFAULT_SCHEDULE = "1f1b"
#: The degrees that divide ranks.
DEGREES = ("tp", "cp", "ulysses", "pp", "ep", "etp", "dp_replicate")


def least_ranks(
    *, tp: int = 1, cp: int = 1, ulysses: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, dp_replicate: int = 1
) -> int:
    """Return the smallest number of ranks that degrees divide, where each replica of the shards is sharded at all."""
    if min(tp, cp, ulysses, pp, ep, etp, dp_replicate) < 1:
        return 1  # which the layout refuses
    shared = tp * cp * ulysses
    replica = math.lcm(shared, ep * etp)
    if dp_replicate > 1 and replica // tp < 2:
        replica *= 2
    return pp * dp_replicate * replica


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The degrees of parallelism on `nodes` × `gpus` ranks. See Note [Parallel layout].

    Attributes:
        gpus: ranks a node, one a GPU.
        nodes: nodes.
        tp: ranks that share each matrix (tensor parallelism).
        sp: whether the tensor-parallel ranks also share the tokens between matrices (Megatron's sequence parallelism).
        cp: ranks that share each sequence (context parallelism: ring attention).
        pp: pipeline stages.
        vpp: model chunks a pipeline stage (the interleaved schedule; virtual pipeline parallelism).
        ep: ranks that share the experts of a layer.
        etp: ranks that share each expert's matrices.
        dp_replicate: replicas of the shard group (HSDP); 1 shards over all data-parallel ranks.
        ulysses: ranks that share each sequence, and in attention its heads (DeepSpeed's ``sequence_parallel_size``).
        whole_vocabulary: whether tensor-parallel ranks have the whole embedding and gather the logits, as transformers' plan
            and DeepSpeed's AutoTP do; else both stay split.
        own_experts: whether experts have process groups of their own at every `ep`, as those of DeepSpeed's layers have.
        auto_ep: whether those layers are AutoEP's (core/auto_ep.py), and not the module's own.

    Raises:
        BadInput: a degree below 1, degrees that do not divide the ranks, or a degree without the one that it belongs to.
    """

    gpus: int = 1
    nodes: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp_replicate: int = 1
    ulysses: int = 1
    whole_vocabulary: bool = False
    own_experts: bool = False
    auto_ep: bool = False

    def __post_init__(self) -> None:
        for name in ("gpus", "nodes", "tp", "cp", "pp", "vpp", "ep", "etp", "dp_replicate", "ulysses"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} {getattr(self, name)} is below 1", where=name, remedy="use a whole number above zero")
        ranks = self.world_size
        self._require_divides(("tp", "cp", "ulysses", "pp"), ranks, f"{self.nodes} × {self.gpus} = {ranks} ranks")
        self._require_divides(("dp_replicate",), self.dp, f"the {self.dp} data-parallel ranks")
        stage = ranks // (self.pp * self.dp_replicate)
        self._require_divides(("ep", "etp"), stage, f"the {stage} ranks of one stage and replica")
        if self.vpp > 1 and self.pp == 1:
            raise BadInput(f"vpp {self.vpp} needs pipeline stages", where="vpp", remedy="raise pp, or use vpp 1")
        if self.sp and self.tp == 1:
            raise BadInput("sp needs tensor parallelism", where="sp", remedy="raise tp, or leave sp out")

    def _require_divides(self, names: tuple[str, ...], total: int, what: str) -> None:
        product = 1
        for name in names:
            product *= getattr(self, name)
        if total % product:
            said = [name for name in names if getattr(self, name) > 1]
            factors = " × ".join(f"{name} {getattr(self, name)}" for name in said)
            shown = factors if " × " not in factors else f"{factors} = {product}"
            raise BadInput(f"{shown} does not divide {what}", where=said[0], remedy=f"use divisors of {total}")

    @property
    def experts_across(self) -> bool:
        """Whether ranks that share the dense matrices have different experts, which are whole (``etp`` 1)."""
        return self.ep > 1 and self.tp > 1 and self.etp == 1

    @property
    def token_parts(self) -> int:
        """Ranks that share the tokens between the matrices: those of tp with sequence parallelism."""
        return self.tp if self.sp else 1

    @property
    def world_size(self) -> int:
        """The number of ranks of the run: nodes × GPUs a node."""
        return self.nodes * self.gpus

    @property
    def dp(self) -> int:
        """Data-parallel ranks: those that read different samples. A step reads micro batch × accumulation × `dp` samples."""
        return self.world_size // (self.tp * self.cp * self.ulysses * self.pp)

    @property
    def shard_group(self) -> int:
        """Ranks over which ZeRO and FSDP shard the dense parameters' states: (dp / dp_replicate) × cp × ulysses."""
        return self.dp // self.dp_replicate * self.cp * self.ulysses

    @property
    def expert_shard_group(self) -> int:
        """Ranks over which FSDP shards the experts' states: those of a stage and replica that hold the same experts."""
        return self.world_size // (self.pp * self.dp_replicate * self.ep * self.etp)

    @property
    def shards_on_one_node(self) -> bool:
        """Whether a shard group lies within one node, so that its collectives use the links between the node's GPUs."""
        ranks = self.shard_group * self.tp  # those between the group's first and last
        return ranks <= self.gpus and (self.nodes == 1 or self.gpus % ranks == 0)

    def secondary_group(self, size: int) -> int:
        """Return the number of ranks in a secondary shard group of at most `size` ranks (ZeRO++ hpZ,
        ``zero_hpz_partition_size``).
        """
        return min(size, self.shard_group)

    def sample_of(self, rank: int) -> int:
        """Return which of the `dp` different samples a rank reads: ranks of one stage, or of one matrix, read the same."""
        return rank // (self.tp * self.cp * self.ulysses) % self.dp

    def pipeline_rank(self, rank: int) -> int:
        """Return a rank's place in the pipeline."""
        return rank // (self.world_size // self.pp)

    @property
    def communicators(self) -> int:
        """Process groups of more than one rank that one rank is in."""
        sizes = [self.shard_group, self.dp_replicate, self.tp, self.cp, self.ulysses, self.pp]
        if self.ep > 1:  # else the experts' groups are those of the rest
            sizes += [self.ep, self.etp, self.expert_shard_group]
        return sum(size > 1 for size in sizes)

    def require_data_parallel_only(self, engine: str, *, but: tuple[str, ...] = ()) -> None:
        """Refuse every degree but data parallelism's and those of `but`, which the engine has."""
        has = " and ".join(["data parallelism", *but])
        for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp_replicate", "ulysses"):
            if name not in but and getattr(self, name) > 1:
                raise BadInput(f"{engine} has {has} only, and no {name}", where=name, remedy=f"leave {name} at 1")
