"""Formula depth: a plan from the ledger alone, with model states and fixed buffers, without activations, peaks and total."""

from __future__ import annotations

from collections.abc import Iterable

from zeroplan.core.buffers import ALWAYS, Phase, Place
from zeroplan.core.plan import CpuMemory, GpuMemory, MemoryPlan, NvmeMemory, PeerFigures, PlanLine
from zeroplan.core.sizes import format_bytes
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Attention, CheckpointPolicy, Workload
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.ledger.deepspeed_estimator import estimate_zero2, estimate_zero3
from zeroplan.ledger.line import Item, derived
from zeroplan.models.facts import largest_module_params, spec_facts
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.fit import ACTIVATIONS, judged, left_out

FORMULA = "formula"


def plan_lines(items: Iterable[Item]) -> tuple[PlanLine, ...]:
    """Items as the plan shows them."""
    return tuple(
        PlanLine(
            buffer=item.buffer.value,
            place=item.place.value,
            bytes=item.bytes,
            phases=tuple(phase.value for phase in item.phases),
            formula=item.formula,
        )
        for item in items
    )


def total(items: Iterable[Item], *places: Place) -> int:
    """Sum up the bytes of the items at these places."""
    return sum(item.bytes for item in items if item.place in places)


def phase_totals(items: Iterable[Item]) -> dict[str, int]:
    """Bytes on the GPU in each phase: the sum of all buffers that have a formula and are alive in it."""
    totals = {phase.value: 0 for phase in ALWAYS}
    for item in items:
        if item.place is Place.HBM:
            for phase in item.phases:
                totals[phase.value] = totals.get(phase.value, 0) + item.bytes
    return totals


def lives_between_steps(item: Item) -> bool:
    """Return whether a buffer is alive between two optimizer steps."""
    return Phase.FORWARD in item.phases and Phase.STEP in item.phases


def formula_plan(engine: Engine, case: Case) -> MemoryPlan:
    """Plan one configuration from its ledger."""
    items = list(derived(*engine.ledger(case)))
    on_gpu = [item for item in items if item.place is Place.HBM]
    states = sum(item.bytes for item in on_gpu if item.state)
    per_node = case.cluster.gpus
    pinned = total(items, Place.PINNED) * per_node
    phases = phase_totals(items)
    needed = max(phases.values())
    gpu = GpuMemory(
        model_states=states,
        fixed_buffers=sum(item.bytes for item in on_gpu if not item.state),
        live_after_step=sum(item.bytes for item in on_gpu if lives_between_steps(item)),
        phases=phases,
        usable=case.cluster.usable_vram,
        bound=_bound(engine, case, needed, pinned // per_node),
    )
    cpu = CpuMemory(per_node=pinned + total(items, Place.DRAM) * per_node, pinned=pinned)
    nvme = NvmeMemory(per_node=total(items, Place.NVME) * per_node)
    unmodelled = (*left_out(engine, case), _activations(case))
    fit = judged(case, unmodelled, gpu=(needed, needed), cpu=cpu.per_node, nvme=nvme.per_node, simulate=how_to_simulate(case))
    return MemoryPlan(
        engine=engine.name,
        engine_version=engine.version,
        stage=case.zero.stage,
        offload_optimizer=case.zero.devices[0].value,
        offload_param=case.zero.devices[1].value,
        depth=FORMULA,
        gpu=gpu,
        cpu=cpu,
        nvme=nvme,
        deepspeed_estimator=peer_figures(case),
        lines=plan_lines(items),
        **fit,
    )


def how_to_simulate(case: Case) -> str:
    """Return what a user does to get figures with activations."""
    if case.spec.has_shapes:
        return "simulate the run: leave out --depth formula"
    return "give the model's id or config.json in place of --params"


def _activations(case: Case) -> Unmodelled:
    """Return the activations that formulas leave out, with an estimate of them."""
    about = activation_estimate(case.spec, case.workload)
    if case.parallel is not None:
        says = "formulas count none, and know no estimate for ranks that share a model"
    elif about is not None:
        says = f"formulas count none: roughly {format_bytes(about)}, and 19 of 20 models keep less than {SPREAD:g} times that"
    elif case.spec.has_shapes:
        says = "formulas count none, and the model's config does not tell its widths"
    else:
        usual = usual_activations(case.spec.params, case.workload)
        says = f"formulas count none: roughly {format_bytes(usual)} for a model of usual shape"
    return Unmodelled(ACTIVATIONS, Effect.MORE, says)


def _bound(engine: Engine, case: Case, needed: int, pinned: int) -> int | None:
    """Return the total with the most that 19 of 20 models keep of activations, and the upper end of what lies outside torch."""
    activations = activation_estimate(case.spec, case.workload)
    if activations is None or case.parallel is not None:
        return None
    outside = engine.outside_torch(case.workload, case.zero, case.cluster, pinned=pinned, layout=case.parallel)
    return needed + round(SPREAD * activations) + outside.total + outside.spread


def peer_figures(case: Case) -> PeerFigures | None:
    """Return the figures of DeepSpeed's own estimator for this stage and offload; it knows stages 2 and 3, and no NVMe."""
    zero = case.zero
    if case.parallel is not None:
        return None  # it knows data parallelism alone
    offload, offload_param = zero.offloads_optimizer, zero.offloads_param
    gpus, nodes = case.cluster.gpus, case.cluster.nodes
    if zero.stage == 2:
        peer = estimate_zero2(case.spec.params, gpus=gpus, nodes=nodes, offload_optimizer=offload)
    elif zero.stage == 3 and OffloadDevice.NVME not in (zero.offload_optimizer.device, zero.offload_param.device):
        if offload_param and not offload:
            return None
        largest = largest_module_params(case.spec)
        if largest is None:
            return None  # a bare count: DeepSpeed's formula for stage 3 needs the largest layer
        peer = estimate_zero3(
            case.spec.params, largest, gpus=gpus, nodes=nodes, offload_optimizer=offload, offload_param=offload_param
        )
    else:
        return None
    return PeerFigures(gpu=peer.gpu, cpu=peer.cpu)


#: A transformer layer keeps s·b·h·(34 + 5·a·s/h) bytes in 16 bits, for sequence s, micro batch b, hidden size h and a heads.
#: Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
#: Transformer Models", equation 2.
_LINEAR, _SCORES = 34, 5
#: Bytes for each token and word of the vocabulary: logits in 16 bits, their fp32 copy, its log-softmax and both gradients.
_LOGIT_BYTES = 2 + 4 + 4 + 4 + 2
#: Hidden size over number of layers, and the vocabulary, for a model of which only the number of parameters is known.
#: Source: Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1.
_HIDDEN_PER_LAYER, _USUAL_VOCABULARY = 128, 1 << 16
#: 19 of 20 traced runs keep at most this many times the formula's bytes: those of included tapes, at a micro batch of 2 and a
#: sequence of 1,024. The others are DeBERTa's and T5's scores, and LoRA on experts. Source: tests/planner/test_bound.py.
SPREAD = 2.4


def activation_estimate(spec: ModelSpec, workload: Workload) -> int | None:
    """About the bytes of one micro batch's activations; None where the config does not give the model's widths."""
    facts = spec_facts(spec)
    if not facts.hidden_size or not facts.layers:
        return None
    return _estimate(facts.hidden_size, facts.layers, facts.heads or 0, facts.vocab_size or 0, workload)


def usual_activations(params: int, workload: Workload) -> int:
    """About the bytes of activations of a model of which only the number of parameters is known.

    The hidden size follows from 12 · layers · hidden² parameters and layers = hidden / 128, as in the GPT-3 family.
    """
    hidden = max(1, round(float(params * _HIDDEN_PER_LAYER / 12) ** (1 / 3)))
    return _estimate(hidden, max(1, hidden // _HIDDEN_PER_LAYER), 0, _USUAL_VOCABULARY, workload)


def _estimate(hidden: int, layers: int, heads: int, vocabulary: int, workload: Workload) -> int:
    """Estimate the bytes of one micro batch's activations.

    Checkpointing of whole blocks keeps each layer's input and recomputes one layer at a time. Other policies keep more, so
    they get the figure without checkpointing. Flash and sdpa attention keep no scores.
    """
    tokens = workload.batch.rows * (workload.batch.seq_len or 1)
    width = workload.numerics.dtype.bytes // 2
    per_layer = _LINEAR * tokens * hidden * width
    if workload.numerics.attn is Attention.EAGER:
        per_layer += _SCORES * heads * tokens * (workload.batch.seq_len or 1) * width
    whole = workload.recomputation == CheckpointPolicy()
    kept = layers * tokens * hidden * workload.numerics.dtype.bytes + per_layer if whole else layers * per_layer
    return kept + _LOGIT_BYTES * tokens * vocabulary
