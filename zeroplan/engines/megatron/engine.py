"""Megatron-LM as an Engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.sizes import GIB
from zeroplan.core.unmodelled import UNMEASURED, Effect, Unmodelled
from zeroplan.core.workload import Attention, DType, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Engine, SearchedLayouts
from zeroplan.engines.case import Case
from zeroplan.engines.megatron.bridge import model_of, require_known, staged
from zeroplan.engines.megatron.float8 import QuantizedOperands
from zeroplan.engines.megatron.lines import LEDGER
from zeroplan.engines.megatron.rank import MegatronRank, Parameter
from zeroplan.engines.technique_lines import with_techniques
from zeroplan.ledger.line import Ledger
from zeroplan.models.megatron import MEGATRON_CORE, MODEL_TYPE, MegatronModel, embedding_weights, final_weights, layer_weights

if TYPE_CHECKING:
    from zeroplan.core.cluster import Cluster
    from zeroplan.core.pipeline import Stage
    from zeroplan.engines.megatron.chunk import ChunkLayers
    from zeroplan.engines.megatron.shapes import Shapes
    from zeroplan.engines.megatron.traffic import MegatronTraffic
    from zeroplan.engines.simulation import Simulation
    from zeroplan.engines.traffic import Sharing
    from zeroplan.models.spec import ModelSpec
    from zeroplan.simulate.allocator.config import AllocatorConfig
    from zeroplan.tape.expanded import ExpandedTape

_MOST_STATES = 2
#: From which capability TransformerEngine prefers cuDNN's attention to FlashAttention's.
_CUDNN = (9, 0)
_NO_MEASUREMENT = Unmodelled(
    UNMEASURED,
    Effect.MORE,
    "no GPU has measured TransformerEngine's layers, whose sizes follow from source, without cuDNN's workspaces; with "
    "Megatron's own layers the peaks of one and two GPUs were met",
)
_FLEX = (
    "DeepEP's buffers, whose sizes its tuned tables give, and the tokens that it sends once to each rank, whose number the data"
    " decide; activations are not shown"
)
#: Buffers that gather hidden states of all tokens, in the format of products, and that scatter them, in 16 bits.
#: Source: TransformerEngine, pytorch/module/base.py (initialize_ub: layers_all_gather_overlap, layers_reduce_scatter_overlap)
_GATHERING, _SCATTERING = 8, 4
_ROUTING = "each expert is planned with as many tokens as the others"


class Megatron(Engine):
    """Megatron-Core's model and optimizers: stage 1 is the distributed optimizer, stage 0 goes without."""

    name = "megatron"
    version = MEGATRON_CORE
    own_layers = True
    layouts = SearchedLayouts(stage=1, staged=1, splits_staged=True, chunks=8)

    def options(self) -> list[ZeroConfig]:
        """Return stage 0, in which every data-parallel rank steps all parameters, and stage 1."""
        return [ZeroConfig.of(0), ZeroConfig.of(1)]

    def default(self) -> ZeroConfig:
        """Return stage 1: ``--use-distributed-optimizer``."""
        return ZeroConfig.of(1)

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse what Megatron's optimizers do not do, or what is not modelled of them."""
        if zero.stage not in (0, 1):
            raise BadInput(
                f"Megatron-LM has no stage {zero.stage}",
                where="--stage",
                remedy="use 1 for --use-distributed-optimizer, or 0 without",
            )
        if zero.offload_optimizer or zero.offload_param:
            raise BadInput("Megatron-LM's offload is not modelled", where="--offload-optimizer", remedy="leave it out")

    def require_layout(self, layout: ParallelLayout) -> None:
        """Refuse replicas of the distributed optimizer."""
        layout.require_data_parallel_only(self.name, but=("tp", "cp", "pp", "vpp", "ep", "etp"))

    def require_workload(self, case: Case) -> None:
        """Refuse what Megatron-LM's own checks refuse, and what is not modelled of it."""
        work = case.workload
        row = find_optimizer(work.numerics.optimizer)
        # Megatron's are TransformerEngine's and Apex's fused Adam and SGD, with two states or one, or none.
        if row.torch is None or not row.torch.fused or len(row.states) > _MOST_STATES:
            raise BadInput(
                f"{work.numerics.optimizer} under Megatron-LM is not modelled", where="--optimizer", remedy="use adamw or sgd"
            )
        if (
            work.numerics.precision is Precision.AUTOCAST
            or work.numerics.precision is Precision.HALF_AUTOCAST
            or work.numerics.precision is Precision.PURE
        ):
            raise BadInput("Megatron-LM keeps 16-bit parameters and fp32 masters", where="--dtype", remedy="use bf16")
        if work.lora_rank is not None:
            raise BadInput("adapters under Megatron-LM are not modelled", where="--lora-rank", remedy="leave it out")
        if case.pipeline != "1f1b":
            raise BadInput("Megatron-LM has 1F1B alone", where="--schedule", remedy="use 1f1b, with --vpp for interleaving")
        if work.recomputation is not None and (work.recomputation.every > 1 or work.recomputation.alternate):
            raise BadInput("Megatron-LM recomputes by layers", where="--checkpoint-policy", remedy="use full or selective")
        for given, where in (
            (work.batch.lengths, "--lengths"),
            (work.batch.media, "--images"),
        ):
            if given:
                raise BadInput("not modelled under Megatron-LM", where=where, remedy="leave it out")
        model = self._model(case)
        if model is None:
            if case.parallel is not None or case.spec.config:
                require_known(case.spec.model_type)
            return
        from zeroplan.engines.megatron.rules import require_valid

        require_valid(model, case.layout, work)

    def unmodelled(self, case: Case) -> tuple[Unmodelled, ...]:
        """Return that nothing of it was measured, which may mean more memory than planned."""
        model = self._model(case)
        mixture = model is not None and bool(model.num_experts)
        found = [replace(_NO_MEASUREMENT, says=f"{_NO_MEASUREMENT.says}; {_ROUTING}") if mixture else _NO_MEASUREMENT]
        if model is not None and model.num_experts and model.moe_token_dispatcher_type == "flex":
            found.append(Unmodelled("--moe-token-dispatcher-type", Effect.MORE, _FLEX))
        if case.layout.sp and case.spec.model_type != MODEL_TYPE:  # a script says itself whether it has them
            shapes = self.rank(case).shapes
            size = 0 if shapes is None else user_buffers(shapes)
            says = f"its user buffers, {size / GIB:.1f} GiB beside torch's memory, which the time of layouts counts on"
            found.append(Unmodelled("--tp-comm-overlap", Effect.MORE, says))
        if model is not None and model.uses_engine and self._scores(case, model):
            says = "TransformerEngine's own unfused attention; Megatron's is in the figures"
            found.append(Unmodelled("--attention-backend", Effect.UNKNOWN, says))
        return tuple(found)

    def remark(self, case: Case) -> str:
        """Say with which arguments the stages of a model of transformers are uneven."""
        model = model_of(case.spec.model_type, case.spec.config)
        if model is None or case.spec.model_type == MODEL_TYPE:
            return ""
        _, flags = staged(model, case.layout)
        return f"{case.layout.pp} stages do not divide the layers evenly: planned with {flags}" if flags else ""

    def simulates(self, case: Case) -> bool:
        """Return whether its layers are described: not those in fp32, with fewer groups of queries than tensor-parallel ranks,
        which gather what they share, or with experts that tokens reach by DeepEP (``flex``).
        """
        model = self._model(case)
        if model is None:
            return True
        shared = model.num_query_groups < case.layout.tp
        if model.num_experts and model.moe_token_dispatcher_type == "flex":
            return False
        return not (shared or case.workload.numerics.dtype is DType.FP32)

    # --- memory -----------------------------------------------------------------------------------------------------------

    def _model(self, case: Case) -> MegatronModel | None:
        """Return Megatron's arguments; a model of transformers gets its recomputation and stages from the case."""
        model = model_of(case.spec.model_type, case.spec.config)
        if model is not None and case.spec.model_type != MODEL_TYPE:
            model, _ = staged(model, case.layout)
        policy = case.workload.recomputation
        if model is None or policy is None or model.recompute_granularity:
            return model
        if policy.selective:
            return replace(model, recompute_granularity="selective")
        return replace(model, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """Return Megatron's lines, and the first rank of the pipeline rank that is looked at."""
        return with_techniques(LEDGER, case.workload), self.rank(case)

    def rank(self, case: Case) -> MegatronRank:
        """Return the first rank of a pipeline rank's, derived once."""
        return case.once(self.name, lambda: self._derive_rank(case))

    def _derive_rank(self, case: Case) -> MegatronRank:
        model, layout, work = self._model(case), case.layout, case.workload
        parts: tuple[ChunkLayers, ...] = ()
        chunks: tuple[tuple[Parameter, ...], ...]
        if model is None:
            parameters = case.spec.parameters
            chunks = (tuple(Parameter(parameters.numel[p]) for p in parameters.trained),)
            frozen = parameters.total - parameters.trained_total
        else:
            from zeroplan.engines.megatron.rules import layers_of

            parts = layers_of(model, layout, case.pp_rank)
            chunks, frozen = tuple(_parameters(model, layout, part) for part in parts), 0
        overlapped = model is not None and model.overlap_grad_reduce and case.pp_rank == 0
        given = model.ddp_bucket_size if model is not None else 0
        return MegatronRank(
            workload=work,
            parameters=case.spec.parameters,
            layout=layout,
            cublas_workspace=case.cluster.gpu.workspace,
            chunks=chunks,
            frozen_numel=frozen,
            distributed=case.zero.stage == 1,
            bucket=(given or max(40_000_000, 1_000_000 * layout.shard_group)) if overlapped else 0,
            reduces_in_half=self._reduces_in_half(case),
            shapes=self._shapes(case, model) if model is not None and self.simulates(case) else None,
            parts=parts,
            capability=case.cluster.gpu.capability,
            pp_rank=case.pp_rank,
            gathers_eight=model is not None and model.fp8_param_gather,
        )

    def _reduces_in_half(self, case: Case) -> bool:
        """Return whether gradients are kept and reduced in 16 bits."""
        model = self._model(case)
        return case.workload.numerics.dtype is DType.FP16 or (model is not None and model.grad_reduce_in_bf16)

    @staticmethod
    def _scores(case: Case, model: MegatronModel) -> bool:
        """Return whether attention keeps all scores."""
        unfused = model.attention_backend in ("unfused", "local") or case.workload.numerics.attn is Attention.EAGER
        return not model.uses_engine or unfused

    def _shapes(self, case: Case, model: MegatronModel) -> Shapes:
        from zeroplan.engines.megatron.shapes import Shapes

        work, layout = case.workload, case.layout
        backend = model.attention_backend
        recipe = work.technique(Float8Recipe)
        return Shapes(
            model=model,
            micro_batch=work.batch.rows,
            seq=(work.batch.seq_len or 1) // layout.cp,
            tp=layout.tp,
            sequence=layout.sp,
            element=work.numerics.dtype.bytes,
            flash=not self._scores(case, model),
            ep=layout.ep,
            etp=layout.etp,
            cp=layout.cp,
            eight=None if recipe is None else QuantizedOperands.on(recipe, case.cluster.gpu.capability),
            cudnn=backend == "fused" or (backend == "auto" and case.cluster.gpu.capability >= _CUDNN),
        )

    def own_tape(self, case: Case) -> ExpandedTape | None:
        """Return the tape of the chunk that keeps the most in one micro batch; None where Megatron's model is not known."""
        rank = self.rank(case)
        if rank.shapes is None:
            return None
        from zeroplan.engines.megatron.chunk import chunk_tape

        tapes = [chunk_tape(rank.shapes, part).tape for part in rank.parts]
        return max(tapes, key=lambda tape: tape.activation_peak)

    def blocks(self, case: Case) -> tuple[tuple[int, int], ...]:
        """Return the layers of each of the pipeline rank's chunks: the first, and the one behind the last."""
        return tuple((part.layers[0], part.layers[-1] + 1) for part in self.rank(case).parts if part.layers)

    def simulate(self, case: Case, tape: ExpandedTape, config: AllocatorConfig | None = None) -> Simulation:
        """Simulate the first rank of the pipeline rank; the other ranks of its groups hold as much or less."""
        from zeroplan.engines.megatron.schedule import record_megatron, record_stages
        from zeroplan.engines.simulation import Simulation
        from zeroplan.simulate.recorder import simulate

        rank = self.rank(case)
        recorder = record_stages(rank) if case.layout.pp > 1 else record_megatron(rank, tape)
        return Simulation(simulate(recorder, config, device_memory=case.cluster.vram))

    def nccl_bytes(self, workload: Workload, zero: ZeroConfig, layout: ParallelLayout) -> int:
        """See :func:`zeroplan.engines.megatron.process.nccl_bytes`."""
        from zeroplan.engines.megatron.process import nccl_bytes

        return nccl_bytes(zero, layout)

    def sharing(self, case: Case) -> Sharing:
        """Return the way with ``--overlap-grad-reduce``, ``--overlap-param-gather`` and ``--tp-comm-overlap``.

        Source: megatron/core/distributed/param_and_grad_buffer.py; TransformerEngine's userbuffers
        """
        from zeroplan.engines.traffic import Hooks, Sharing

        return Sharing(
            gathers_once=True,
            reduced_bytes=DType.FP32.bytes // (1 + self._reduces_in_half(case)),
            pipelines_tensor=True,
            even_stages=True,
            dispatches=False,
            hooks=Hooks.NONE,
            sums_jointly=True,
            gathers_again=True,
        )

    def held_elements(self, case: Case, stages: Sequence[Stage]) -> tuple[int, int]:
        """Return them of Megatron's own arguments, too, whose parameters no other engine divides."""
        if case.spec.model_type != MODEL_TYPE:
            return super().held_elements(case, stages)
        held = [p for chunk in self.rank(case).chunks for p in chunk]
        experts = sum(p.numel for p in held if p.expert)
        return sum(p.numel for p in held) - experts, experts

    # --- time -------------------------------------------------------------------------------------------------------------

    def traffic(self, spec: ModelSpec, cluster: Cluster) -> MegatronTraffic:
        """See ``zeroplan/engines/megatron/traffic.py``."""
        from zeroplan.engines.megatron.traffic import MegatronTraffic

        return MegatronTraffic(spec, cluster, self.rank)

    # --- verify -----------------------------------------------------------------------------------------------------------

    def require_verifiable(self, zero: ZeroConfig) -> None:
        """Refuse: Megatron-LM needs its own program."""
        raise BadInput("verify does not run Megatron-LM", where="--engine", remedy="use --engine zeroplan, or estimate alone")


def user_buffers(shapes: Shapes) -> int:
    """Return the bytes of the buffers in which collectives of tensor parallelism overlap products."""
    elements = shapes.whole // shapes.element
    return elements * (_GATHERING * (shapes.element if shapes.eight is None else 1) + _SCATTERING * shapes.element)


def _parameters(model: MegatronModel, layout: ParallelLayout, part: ChunkLayers) -> tuple[Parameter, ...]:
    """Return the parameters of one chunk on one rank, in Megatron's order."""
    tied = not model.untie_embeddings_and_output_weights and layout.pp > 1
    weights = [(one, False) for one in embedding_weights(model, layout.tp)] if part.embeds else []
    if weights and tied:
        weights[0] = (weights[0][0], True)
    for layer in part.layers:
        weights += [
            (one, False) for one in layer_weights(model, layer, model.num_experts // layout.ep if model.num_experts else 0)
        ]
    if part.ends:
        own = model.untie_embeddings_and_output_weights or layout.pp > 1
        weights += [(one, tied and one.name == "output_layer.weight") for one in final_weights(model, layout.tp, own_head=own)]
    found = []
    for one, shared in weights:
        shape = one.local(layout.etp if one.expert else layout.tp)
        count = 1
        for size in shape:
            count *= size
        found.append(Parameter(count, one.expert and layout.ep > 1, shared, model.uses_engine and one.multiplies))
    return tuple(found)
