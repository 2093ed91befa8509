"""The included runtime simulated: its schedule laid over the tape, and its host and checkpoints beside it.

transformers casts the logits to fp32 and takes their log-softmax in the forward, and makes two gradients of that size in the
backward, before the cast's gradient has the logits' dtype. The runtime's loss keeps the logits until it has written their
gradient, and two numbers a row. Source: zeroplan_runtime/techniques/fused_loss.py;
transformers/loss/loss_utils.py, ForCausalLMLoss.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

from zeroplan.core.arena.layout import ArenaLayout
from zeroplan.core.arena.layout_setup import RuntimeSetup
from zeroplan.core.buffers import Phase
from zeroplan.core.errors import BadInput
from zeroplan.core.losses import leaves_loss_to_function
from zeroplan.core.workload import ChunkedHead, DType, Workload
from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan.engines.case import Case
from zeroplan.engines.player import Run, play
from zeroplan.engines.runtime.checkpoints import OffloadedInput, host_buffers, with_offloaded_inputs
from zeroplan.engines.runtime.chunked_cross_entropy import KEY, with_chunked_cross_entropy
from zeroplan.engines.runtime.float8 import float8_layers, with_float8
from zeroplan.engines.runtime.host import checkpoint_phases, host_phases
from zeroplan.engines.runtime.labelled_tokens import with_labelled_tokens
from zeroplan.engines.runtime.schedule import STEPS_UNTIL_STEADY, RuntimeSchedule, with_direct_gradients
from zeroplan.engines.script import MOST_SCRIPTS
from zeroplan.engines.simulation import Simulation
from zeroplan.simulate.allocator.config import UNLIMITED, AllocatorConfig
from zeroplan.simulate.recorder import Recorder, simulate
from zeroplan.tape.edit import TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind
from zeroplan.techniques.table import blocks_of


@dataclass(frozen=True, slots=True)
class _Rewriting:
    """What decides how the runtime's own computation is written into a tape: less than a case, so that many cases share it."""

    options: RuntimeOptions
    direct: bool
    float8_blocks: frozenset[str]
    rows: int
    share: float
    itemsize: int
    where: str
    tp: int

    @classmethod
    def of(cls, workload: Workload, layout: ArenaLayout, options: RuntimeOptions, tp: int) -> _Rewriting:
        """Return what a configuration decides."""
        return cls(
            options=options,
            direct=_writes_gradients(layout.setup, options),
            float8_blocks=frozenset(unit.shape.name for unit in layout.units if unit.multiplies_in_float8),
            rows=workload.batch.rows * (workload.batch.seq_len or 0),
            share=workload.batch.labelled_share or 1.0,
            itemsize=layout.setup.param_dtype.bytes,
            where="--chunked-head" if workload.has(ChunkedHead) else KEY,
            tp=tp,
        )


def computed_tape(
    workload: Workload, layout: ArenaLayout, runtime_options: RuntimeOptions, tape: ExpandedTape, *, tp: int = 1
) -> ExpandedTape:
    """Return `tape` with the runtime's head and loss, and with the weight gradients of linear layers written in place.

    Where `tp` ranks share the logits, the loss is torch's.
    """
    return _rewritten(tape, _Rewriting.of(workload, layout, runtime_options, tp))


def _rewritten(tape: ExpandedTape, how: _Rewriting) -> ExpandedTape:
    recipe, chunk, layers = how.options.float8_recipe, how.options.chunked_cross_entropy, dict[int, int]()
    if recipe is not None:
        layers = float8_layers(tape, recipe, how.float8_blocks)
    if how.direct:
        tape = with_direct_gradients(tape, frozenset(layers.values()))
    if recipe is not None:
        tape = with_float8(tape, layers, recipe)
    if chunk and how.tp > 1:
        remedy = "leave it out, or use no tensor parallelism"
        raise BadInput("ranks of tp have parts of the head", where=how.where, remedy=remedy)
    if (how.options.fused_loss and how.tp == 1) or chunk:
        tape = with_fused_loss(tape, rows=how.rows, itemsize=how.itemsize)
    if how.options.labelled_tokens_only:
        tape = with_labelled_tokens(tape, tokens=how.rows, share=how.share)
    if chunk:
        tape = with_chunked_cross_entropy(tape, tokens=chunk, where=how.where)
    return tape


@lru_cache(maxsize=MOST_SCRIPTS)
def _played(expanded: ExpandedTape, moved: tuple[OffloadedInput, ...], how: _Rewriting, *, eager: bool) -> ExpandedTape:
    """The tape that is played, one object for all cases that play the same.

    An evaluation of the runtime's own, and batches of other lengths, are not modelled; a first one that runs uncompiled is, by
    `eager`.
    """

    def computed(one: ExpandedTape) -> ExpandedTape:
        return _rewritten(with_offloaded_inputs(one, moved) if moved else one, how)

    first = tuple(map(computed, expanded.shapes)) if eager else ()
    return replace(computed(replace(expanded, evaluation=None, shapes=())), shapes=first)


def _writes_gradients(setup: RuntimeSetup, runtime_options: RuntimeOptions) -> bool:
    """Return whether linear layers write their weights' gradients in place.

    On a GPU a product of 16-bit factors may be written in fp32, but not the other way round.
    """
    whole = setup.reduce_dtype if setup.shards_grads else setup.whole_grad_dtype
    return runtime_options.direct_linear and whole in (setup.param_dtype, DType.FP32)


def simulate_rank(
    case: Case,
    layout: ArenaLayout,
    runtime_options: RuntimeOptions,
    moved: Collection[OffloadedInput],
    expanded: ExpandedTape,
    config: AllocatorConfig | None = None,
) -> Simulation:
    """Simulate one rank; all ranks own and do the same.

    Args:
        case: the configuration.
        layout: what the Arena allocates by.
        runtime_options: the ``zeroplan`` section of the ds_config.
        moved: the checkpointed inputs that leave for pinned memory, or are divided.
        expanded: the model's expanded tape.
        config: settings of the caching allocator; None for its defaults.
    """
    if case.layout.pp > 1:
        return _simulate_stage(case, layout, runtime_options, expanded, config)
    skipped = 1 if case.workload.numerics.dtype is DType.FP16 else 0
    room = _makes_room(config)
    recorder = Recorder()
    how = _Rewriting.of(case.workload, layout, runtime_options, case.layout.tp)
    tape = _played(expanded, tuple(moved), how, eager=case.workload.compile is not None)
    workspace = case.cluster.gpu.workspace
    schedule = RuntimeSchedule(layout, tape, recorder, cublas_workspace=workspace, makes_room=room)
    accum, detached = case.workload.batch.grad_accum, case.workload.loop.detached_loss
    run = Run(accum, STEPS_UNTIL_STEADY, skipped, workspace, detached, blocks=blocks_of(case.workload, layout))
    play(run, tape, recorder, schedule, warm=True)
    host = host_phases(layout, case.spec.params * case.workload.numerics.param_bytes, host_buffers(moved))
    timeline = simulate(recorder, config, device_memory=case.cluster.vram)
    found = Simulation(timeline, host=host, moved=tuple(one.part for one in moved if one.to_host))
    after = [found.held_after(phase) or 0 for phase in (Phase.INIT, Phase.STEP)]
    return replace(found, checkpoint=checkpoint_phases(layout, host, after_init=after[0], after_step=after[1]))


def _makes_room(config: AllocatorConfig | None) -> bool:
    return config is None or config.max_split_size == UNLIMITED


def _simulate_stage(
    case: Case, layout: ArenaLayout, runtime_options: RuntimeOptions, expanded: ExpandedTape, config: AllocatorConfig | None
) -> Simulation:
    """Simulate one pipeline rank. See Note [The runtime on a stage] in ``pipeline.py``."""
    from zeroplan.engines.runtime.pipeline import record_stage

    tape = replace(expanded, evaluation=None, shapes=())
    if _writes_gradients(layout.setup, runtime_options) and not case.halves:
        tape = with_direct_gradients(tape)
    timeline = simulate(
        record_stage(case, layout, tape, makes_room=_makes_room(config)), config, device_memory=case.cluster.vram
    )
    host = host_phases(layout, case.spec.params * case.workload.numerics.param_bytes, {})
    found = Simulation(timeline, host=host)
    after = [found.held_after(phase) or 0 for phase in (Phase.INIT, Phase.STEP)]
    return replace(found, checkpoint=checkpoint_phases(layout, host, after_init=after[0], after_step=after[1]))


_WIDE = 4  # bytes of an fp32 number


@dataclass(frozen=True, slots=True)
class _Loss:
    """Storages of transformers' loss in the tape: those it takes, those never made, the logits' gradient."""

    logits: int
    dropped: frozenset[int]
    first_dropped: int
    grad: int


def with_fused_loss(tape: ExpandedTape, *, rows: int, itemsize: int) -> ExpandedTape:
    """`tape` with the loss over `rows` tokens computed by the runtime; as it is, where that loss is not in it.

    Args:
        tape: the tape of one micro batch.
        rows: tokens of the micro batch.
        itemsize: bytes of one logit.
    """
    edit = TapeEdit(tape)
    loss = _find(edit, itemsize)
    if loss is None:
        return tape
    first = edit.made[loss.first_dropped]
    sums = edit.before(first, tape.module[first]).alloc(rows * _WIDE, Kind.SAVED)
    edit.drop_storages(loss.dropped)
    edit.drop_frees((loss.logits,))
    edit.behind(edit.made[loss.grad]).free(sums, loss.logits)
    return edit.result()


def _find(edit: TapeEdit, itemsize: int) -> _Loss | None:
    """Find the loss of a causal language model by its model's class and the sizes of what it allocates."""
    tape = edit.tape
    forward = [at for at in edit.allocations(range(tape.backward)) if tape.kind[at] == Kind.LOGITS or _is_loss(tape, at)]
    backward = [at for at in edit.allocations(range(tape.backward, len(tape))) if _is_loss(tape, at)]
    head = next((tape.aux[at] for at in reversed(forward) if tape.kind[at] == Kind.LOGITS), 0)
    wide = head // itemsize * _WIDE
    copies = [place for place, at in enumerate(forward) if tape.aux[at] == wide]
    after = [tape.arg[at] for at in backward if tape.aux[at] == wide]
    if itemsize == _WIDE:  # the cast made no copy: the last two of their size are log-softmax's output, and its gradient
        if len(copies) < 2 or len(after) < 2:
            return None
        logits, softmax = (tape.arg[forward[place]] for place in copies[-2:])
        return _Loss(logits, frozenset({softmax, after[0]}), softmax, after[1])
    narrow = [tape.arg[at] for at in backward if tape.aux[at] == head]
    if len(copies) != 2 or not copies[0] or len(after) != 2 or not narrow:
        return None
    dropped = [tape.arg[forward[place]] for place in copies]
    return _Loss(tape.arg[forward[copies[0] - 1]], frozenset((*dropped, *after)), dropped[0], narrow[0])


def _is_loss(tape: ExpandedTape, at: int) -> bool:
    module = tape.module[at]
    return tape.kind[at] == Kind.LOSS and module >= 0 and leaves_loss_to_function(tape.modules[module].type)
