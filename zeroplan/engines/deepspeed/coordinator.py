"""Stage 3's gathering and release of parameters, decision by decision.

Functions named in brackets are those of DeepSpeed 0.19.8's runtime/zero/partitioned_param_coordinator.py, and
``all_gather_coalesced``, ``AllGatherCoalescedHandle`` and ``free_param`` those of its zero/partition_parameters.py.

Note [Trace]
    The first forward and backward record in which order modules want their parameters. From the second on the trace is
    complete: each module's fetch then also gathers what comes next (prefetch), as far as `prefetch_bucket_size` more
    elements and `max_live_parameters` in all allow, and a module's release keeps what returns within `max_reuse_distance`.
    Every fetch is one step of the trace, forwards, backwards and recomputations alike. The search for what returns asks of the
    module that is released, not of those that follow, whether it is a leaf module: where it is none, leaf modules that follow
    count without what is below them, and where it is one, every module that follows counts with it (``__params_to_release``).

Note [Lag]
    A block that another stream used is reusable when that stream has passed its free. Stage 3's Python hooks take longer
    than the kernels between them, so the device mostly follows closely. In recorded histories a gradient's block is back in
    the pool one allocation after the next one, and a parameter's at once, or with several ranks a few modules later. Behind
    the head and the loss, and wherever kernels take longer than hooks, parameters are back tens of fetches later: as far as
    simulation.py says at most. Which it is decides how the gathers' stream is fragmented.
    Gradients that wait for a reduce-scatter are back up to three buckets later (stage3.py, max_param_reduce_events), which adds
    nothing to reserved memory: what the forward saved is being freed beside them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial

from zeroplan.core.buffers import Buffer
from zeroplan.engines.deepspeed.base import COMPUTE, GATHER
from zeroplan.engines.deepspeed.leaf_modules import subtree_params
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.versions import Knob
from zeroplan.simulate.deferred_frees import DeferredFrees
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import TapeModule

_ABSENT, _IN_FLIGHT, _AVAILABLE = range(3)
_NEVER = -(10**10)

#: How many fetches the device is behind the host at least, in freeing what the compute stream used: with several ranks it
#: waits for their collectives. See Note [Lag].
FETCHES_BEHIND = 3


def least_behind(rank: DeepSpeedRank) -> int:
    """Return how many fetches a rank's device is behind at least: none under offload, as measured (E111, E119, D33, U10)."""
    return FETCHES_BEHIND if rank.device_lags and not rank.offloads_optimizer and not rank.zero.offloads_param else 0


class _Gather:
    """One all-gather that has been issued and not yet waited for (partition_parameters.py, AllGatherCoalescedHandle).

    `flats` are its buffers, one a dtype, which go when the last of its parameters has been asked for; `temps` go when it is
    waited for. `cut` says that a buffer holds several parameters, each rank's part of all of them in a row.
    """

    __slots__ = ("cut", "flats", "params", "temps", "waited", "wanted")

    def __init__(self, params: list[int], flats: list[int], temps: list[int], *, cut: bool) -> None:
        self.params, self.flats, self.temps, self.cut = list(params), flats, temps, cut
        self.wanted = len(params)
        self.waited = False


class _Trace:
    """A complete trace: the modules in order, their parameters, and where each parameter is used again."""

    def __init__(
        self,
        modules: Sequence[int],
        params: Sequence[Sequence[int]],
        numel: Sequence[int],
        own: Mapping[int, Sequence[int]],
    ) -> None:
        self.uses: list[tuple[int, int]] = []  # (parameter, step)
        self.steps_of: dict[int, list[int]] = {}
        self.before = [0]  # elements asked for before each step
        self.modules, self.numel = modules, numel
        for step, module in enumerate(modules):
            self.uses += [(p, step) for p in params[module]]
            alone = own.get(module, params[module])
            for p in alone:
                self.steps_of.setdefault(p, []).append(step)
            self.before.append(self.before[-1] + sum([numel[p] for p in alone]))

    def returns_within(self, param: int, step: int, distance: int) -> bool:
        """Return whether a module from `step` on, less than `distance` elements away, uses the parameter. See Note [Trace]."""
        steps = self.steps_of.get(param, ())
        at = bisect_left(steps, step)
        return at < len(steps) and self.before[steps[at]] - self.before[min(step, len(self.before) - 1)] < distance

    def returns_below(self, step: int, distance: int, below: Callable[[int], Sequence[int]]) -> set[int]:
        """Return the parameters that modules from `step` on, less than `distance` elements away, have `below` them."""
        found: set[int] = set()
        for module in self.modules[step:]:
            if distance <= 0:
                break
            found.update(below(module))
            distance -= sum([self.numel[p] for p in below(module)])
        return found


class Coordinator:
    """The parameters that are gathered now, and the blocks that they are gathered into.

    Args:
        rank: whose parameters.
        recorder: where allocations go.
        module_params: what each module fetches: its own parameters, or all below it where it is a leaf module.
        modules: all modules; needed where there are leaf modules.
        leaves: the leaf modules.
        read_by: modules that never run, whose parameters another module reads in its forward.
        waiting: the frees of another model that wait for the same stream; None where there is none.
    """

    def __init__(
        self,
        rank: DeepSpeedRank,
        recorder: Recorder,
        module_params: Sequence[Sequence[int]],
        read_by: Mapping[int, int] | None = None,
        waiting: DeferredFrees | None = None,
        *,
        modules: Sequence[TapeModule] = (),
        leaves: Collection[int] = (),
    ) -> None:
        zero = rank.zero
        self.rank, self.recorder = rank, recorder
        self.alloc = recorder.alloc
        self.module_params = [sorted(set(ps)) for ps in module_params]
        self.read_by = read_by or {}
        self.leaves = {m: modules[m].params for m in leaves}  # their own parameters
        self.below = cache(partial(subtree_params, modules))
        self.persistent = frozenset(rank.persistent_params)
        self.on_host = zero.offloads_param  # whether shards are in host memory
        self.copies_shards = self.on_host or any(travel != rank.param_bytes for travel in rank.gather_of)
        self.stream = GATHER if zero.overlaps_comm else COMPUTE
        self.alone = waiting is None
        self.deferred_frees = waiting or DeferredFrees(recorder, least_behind(rank))
        recorder.deferred_frees = self.deferred_frees if rank.device_lags else None
        self.frozen_stay = rank.does(Knob.FROZEN_STAY_FOR_BACKWARD)
        self.prefetch = 1 if zero.stage3.allgather_sequential else zero.stage3.prefetch_bucket_size
        count = len(rank.numel)
        self.status = [_ABSENT] * count
        self.blocks: list[tuple[int, int] | None] = [None] * count  # (handle, stream it was made on)
        self.active: list[set[int]] = [set() for _ in range(count)]
        self.fetched_at = [_NEVER] * count
        self.inflight: dict[int, _Gather] = {}
        self.live = 0
        self.step = 0
        self.trace: _Trace | None = None
        self.recorded: list[int] | None = None
        self.queue = 0
        self.shared: dict[int, _Gather] = {}  # parameters that are views of one buffer (all-reduce in place of gather)
        self.backward_modules: dict[int, None] = {}
        self.recomputed: dict[int, set[int]] = {}
        self.kept: dict[tuple[int, int], frozenset[int]] = {}
        self.before_free: Callable[[int], None] = lambda param: None  # hpZ makes its secondary shard there
        self.secondary: Mapping[int, int] = {}  # parameters that hpZ gathers from a second shard
        self.saved: dict[int, list[tuple[int, int]]] = {}  # blocks that a module's products keep (saved_weights.py)
        self.savers: dict[int, int] = {}  # by block, how many products and graphs keep it
        self.released: set[int] = set()  # blocks that only those keep

    # A micro batch

    def begin(self) -> None:
        """Begin a forward with a new trace (partitioned_param_coordinator.py, reset_step)."""
        for p, gather in list(self.inflight.items()):
            self._wait(gather)
            self._release(p)
        self.inflight.clear()
        if self.trace is None:
            if self.recorded is not None:
                self.trace = _Trace(self.recorded, self.module_params, self.rank.numel, self.leaves)
            else:
                self.recorded = []
        self.queue = self.step = self.live = 0
        if self.alone:
            self.deferred_frees.begin()
        self.fetched_at = [_NEVER] * len(self.fetched_at)

    def fetch(self, module: int, *, forward: bool, recomputing: bool = False) -> None:
        """Gather the module's parameters, wait for them, and prefetch those of later modules (fetch_sub_module)."""
        if module in self.read_by:
            if forward:
                self.read(self.read_by[module], self.module_params[module])
            return
        self.deferred_frees.tick()
        if self.trace is None and self.recorded is not None:
            self.recorded.append(module)
        if not forward:
            self.backward_modules[module] = None
        params = self.module_params[module]
        if params:
            status = self.status
            absent = [p for p in params if status[p] == _ABSENT]
            if absent:
                self._gather(absent)
            for p in params:
                self.active[p].add(module)
                if recomputing and self.frozen_stay and self.backward_modules and not self.rank.parameters.trainable[p]:
                    owner = next(reversed(self.backward_modules))
                    self.recomputed.setdefault(owner, set()).add(p)
                    self.active[p].add(owner)
                gather = self.inflight.pop(p, None)
                if gather is not None:
                    self._wait(gather)
        if self.trace is not None:
            self._prefetch(params, self.trace)
        self.step += 1

    def read(self, module: int, params: Iterable[int]) -> None:
        """Gather parameters that `module` reads beside its own, where they are not there; from then on it fetches them, too.

        They are gathered on the stream of the computation, and their number counts only when they go.
        Source: zero/parameter_offload.py, ZeROOrderedDict.__getitem__; partition_parameters.py, _allgather_params_sequential
        """
        for p in params:
            if self.status[p] != _ABSENT:
                continue
            self.module_params[module] = sorted({*self.module_params[module], p})
            whole = self.rank.param_bytes * self.rank.whole[p]
            self.blocks[p] = (self.alloc(whole, Buffer.PARAM_FULL, note=p), COMPUTE)
            if self.on_host:
                self.recorder.free(self.alloc(self.rank.param_bytes * self.rank.shards[p], Buffer.STAGE_H2D, note=p))
            self.status[p] = _AVAILABLE

    def _prefetch(self, params: Sequence[int], trace: _Trace) -> None:
        uses, fetched_at, step = trace.uses, self.fetched_at, self.step
        wanted = sum([fetched_at[p] < step for p in params])
        seen: set[int] = set()
        while self.queue < len(uses) and len(seen) < wanted:
            p, at = uses[self.queue]
            self.queue += 1
            fetched_at[p] = at
            seen.add(p)
        if self.prefetch <= 0:
            return
        most = min(self.rank.zero.stage3.max_live_parameters - self.live, self.prefetch)
        chosen: list[int] = []
        elements = 0
        while self.queue < len(uses) and elements < most:
            p, at = uses[self.queue]
            self.queue += 1
            absent = self.status[p] == _ABSENT and p not in chosen
            fetched_at[p] = max(fetched_at[p], at)
            if absent:
                chosen.append(p)
                elements += self.rank.numel[p]
        if elements > 0:
            self._gather(sorted(chosen))

    def release(self, module: int, *, forward: bool) -> None:
        """Free the module's parameters that no later module is about to use (release_sub_module)."""
        if module in self.read_by:
            return
        params: Iterable[int] = self.module_params[module]
        going: set[int] | frozenset[int] = self._leaving(module) if self.trace is not None else frozenset(params)
        if not forward:
            extra = self.recomputed.pop(module, None)
            if extra:
                going = set(going) | {p for p in extra if p not in self.persistent}
                params = {*params, *extra}
            self.backward_modules.pop(module, None)
        for p in params:
            self.active[p].discard(module)
            if p in going:
                self._release(p)

    def _leaving(self, module: int) -> frozenset[int]:
        """Return the parameters to release after a module, cached by module and step as DeepSpeed does
        (``__params_to_release``).
        """
        key = (module, self.step)
        found = self.kept.get(key)
        if found is None:
            trace, step, distance = self.trace, self.step, self.rank.zero.stage3.max_reuse_distance
            assert trace is not None
            going = [p for p in self.module_params[module] if p not in self.persistent and self.fetched_at[p] <= step]
            if module in self.leaves:
                found = frozenset(going) - trace.returns_below(step, distance, self.below)
            else:
                found = frozenset(p for p in going if not trace.returns_within(p, step, distance))
            self.kept[key] = found
        return found

    def end_backward(self) -> None:
        """Free what no hook frees: modules whose inputs need no gradient (release_backward_leftovers)."""
        if not self.frozen_stay:
            self.backward_modules.clear()
        while self.backward_modules:
            module, _ = self.backward_modules.popitem()
            for p in {*self.module_params[module], *self.recomputed.pop(module, ())}:
                self.active[p].discard(module)
                if p not in self.persistent:
                    self._release(p)

    def release_all(self) -> None:
        """Free all gathered parameters before the step, persistent ones included (release_and_reset_all)."""
        for p in range(len(self.status)):
            gather = self.inflight.pop(p, None)
            if gather is not None:
                self._wait(gather)
            self.active[p].clear()
            self._release(p)

    def gather_all(self) -> None:
        """Gather all parameters on the computation's stream, after what is on its way (partition_parameters.py,
        GatheredParameters).
        """
        for gather in dict.fromkeys(self.inflight.values()):
            self._wait(gather)
        self.inflight.clear()
        every = range(len(self.status))
        absent = [p for p in every if self.status[p] == _ABSENT]
        if self.on_host:
            copies = [self.alloc(self.rank.param_bytes * self.rank.shards[p], Buffer.STAGE_H2D, note=p) for p in absent]
        for p in absent:
            whole = self.rank.param_bytes * self.rank.whole[p]
            if self.rank.ranks_of[p] > 1 or self.on_host:
                self.blocks[p] = (self.alloc(whole, Buffer.PARAM_FULL, note=p), COMPUTE)
            self.status[p] = _AVAILABLE
        if self.on_host:
            self.recorder.free_all(copies)

    def forget_trace(self) -> None:
        """Void the trace: the next forward records another, and the one after it uses that (_invalidate_trace)."""
        self.trace = self.recorded = None

    def gather_persistent(self) -> None:
        """Gather the persistent parameters after the step, each into a block of its own (stage3.py, _post_step)."""
        self.deferred_frees.complete_all()
        rank = self.rank
        chosen = sorted(self.persistent)
        groups = [rank.ranks_of[p] for p in chosen]
        for p in chosen:
            aliased = rank.ranks_of[p] == 1 and groups.count(1) > 1
            if not aliased or self.on_host:
                count = rank.numel[p] if aliased else rank.whole[p]
                self.blocks[p] = (self.alloc(rank.param_bytes * count, Buffer.PARAM_PERSISTENT, note=p), COMPUTE)
            self.status[p] = _AVAILABLE

    # Blocks

    def _gather(self, params: list[int]) -> None:
        """Gather parameters: those with hpZ's secondary shard first, from within the group, then the others
        (``__all_gather_params_``). Experts have a group of their own, and so has what AutoTP keeps (``all_gather_coalesced``,
        params_by_group).
        """
        if self.rank.experts or self.rank.kept:
            place = self.rank.partition_group
            for number in sorted({place[p] for p in params}):
                self._gather_together([p for p in params if place[p] == number])
            return
        second = [p for p in params if p in self.secondary] if self.secondary else []
        for group in (second, [p for p in params if p not in self.secondary] if second else params):
            if group:
                self._gather_together(group)

    def _gather_together(self, params: list[int]) -> None:
        """Gather one parameter straight into place, or several through one flat buffer (``all_gather_coalesced``)."""
        self.deferred_frees.poll()
        rank, alloc, stream = self.rank, self.alloc, self.stream
        w, ranks, numel = rank.param_bytes, rank.ranks_of[params[0]], rank.numel
        self.live += sum([numel[p] for p in params])
        flats: list[int] = []
        temps: list[int] = []
        cut = len(params) > 1 and not rank.zero.stage3.allgather_sequential
        if ranks == 1:  # no collective: an alias of the shard, or its copy from the host
            for p in params:
                if self.on_host:
                    self.blocks[p] = (alloc(w * numel[p], Buffer.PARAM_FULL, stream=stream, note=p), stream)
        elif not cut:
            for p in params:
                part, travel = rank.shards[p], rank.gather_of[p]
                whole = alloc(travel * part * ranks, Buffer.PARAM_FULL, stream=stream, note=p)
                if travel == w:
                    self.blocks[p] = (whole, stream)
                else:
                    flats.append(whole)
                if self.copies_shards:
                    temps += self._shard_copies(p)
        else:
            widths = {rank.gather_of[p] for p in params}
            for travel in sorted(widths):
                alike = params if len(widths) == 1 else [p for p in params if rank.gather_of[p] == travel]
                parts = sum([rank.shards[p] for p in alike])
                flats.append(alloc(travel * parts * ranks, Buffer.COMM_ALL_GATHER, stream=stream, note=alike[0]))
                if self.copies_shards:
                    self.recorder.free_all([copy for p in alike for copy in self._shard_copies(p)])
        gather = _Gather(params, flats, temps, cut=cut)
        for p in params:
            self.status[p] = _IN_FLIGHT
            self.inflight[p] = gather

    def _shard_copies(self, p: int) -> list[int]:
        """Return a shard's copy from the host, and its cast to the dtype that it travels in."""
        rank = self.rank
        part = rank.secondary_shards[p] if p in self.secondary else rank.shards[p]
        widths = [rank.param_bytes] * self.on_host + [rank.gather_of[p]] * (rank.gather_of[p] != rank.param_bytes)
        return [self.alloc(width * part, Buffer.STAGE_H2D, stream=self.stream, note=p) for width in widths]

    def _wait(self, gather: _Gather) -> None:
        """Cut the flat buffers into parameters, once a parameter (``AllGatherCoalescedHandle.wait``)."""
        w = self.rank.param_bytes
        in_place = self.rank.zero.stage3.use_all_reduce_for_fetch_params
        if not gather.waited:
            gather.waited = True
            for p in gather.params:
                if gather.flats and in_place:
                    self.shared[p] = gather
                elif gather.flats:
                    count, travel = self.rank.numel[p], self.rank.gather_of[p]
                    widths = [travel] * gather.cut + [w] * (travel != w)  # cut out, then cast
                    whole = [self.alloc(width * count, Buffer.PARAM_FULL, stream=self.stream, note=p) for width in widths]
                    self.recorder.free_all(whole[:-1])
                    self.blocks[p] = (whole[-1], self.stream)
                self.status[p] = _AVAILABLE
            self.recorder.free_all(gather.temps)
        if not (gather.flats and in_place):
            self._drop_reference(gather)

    def _drop_reference(self, gather: _Gather) -> None:
        gather.wanted -= 1
        if gather.wanted == 0:
            self.recorder.free_all(gather.flats)

    def _release(self, param: int) -> None:
        """Free a parameter; its block waits until the compute stream is done with it (free_param)."""
        if self.status[param] != _AVAILABLE or self.active[param]:
            return
        self.before_free(param)
        self.status[param] = _ABSENT
        self.live -= self.rank.numel[param]
        if param in self.shared:
            self._drop_reference(self.shared.pop(param))
        block = self.blocks[param]
        if block is not None:
            self.blocks[param] = None
            if block[0] in self.savers:
                self.released.add(block[0])
            else:
                self._free(block)

    def _free(self, block: tuple[int, int]) -> None:
        handle, stream = block
        if stream != COMPUTE:
            self.recorder.record_stream(handle, COMPUTE)
            self.deferred_frees.free(handle)
        self.recorder.free(handle)

    def save(self, module: int, params: Iterable[int]) -> None:
        """Keep the weights that the module's products save for the backward until :meth:`drop_saved`."""
        self.saved.setdefault(module, []).extend(self.hold(params))

    def drop_saved(self, module: int) -> None:
        """Free the weights that :meth:`save` kept: the backward of the module's products has ended."""
        self.let_go(self.saved.pop(module, ()))

    def drop_all_saved(self) -> None:
        """Free what :meth:`save` kept for modules whose inputs need no gradient: the whole backward has ended."""
        for module in tuple(self.saved):
            self.drop_saved(module)

    def hold(self, params: Iterable[int]) -> list[tuple[int, int]]:
        """Return the blocks of gathered parameters, which stay beyond their release until :meth:`let_go`."""
        blocks = [block for p in params if (block := self.blocks[p]) is not None]
        for handle, _ in blocks:
            self.savers[handle] = self.savers.get(handle, 0) + 1
        return blocks

    def let_go(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Free blocks that :meth:`hold` returned, where nothing else holds them and their parameters are released."""
        for block in blocks:
            handle = block[0]
            self.savers[handle] -= 1
            if not self.savers[handle]:
                del self.savers[handle]
                if handle in self.released:
                    self.released.discard(handle)
                    self._free(block)
