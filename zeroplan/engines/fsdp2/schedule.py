"""FSDP2's allocations over a run: what `fully_shard` on each block and the root gathers, reduces and frees, and when.

Note [FSDP2's buffers]
    A group is a block's parameters, or the root's (all that no block holds). To unshard one, its chunks of another dtype are
    cast into a flat input, all are gathered into an output of ranks × them, and copied out into one tensor a parameter. In the
    forward the output lives until the next group's copy-out; in the backward it is freed at once, and the group before it in
    the forward's order is gathered ahead. After a block's backward its gradients are packed, in the reduction's dtype, into a
    flat input that lives until the next block's, and reduced into this rank's part, of which the sharded gradients are
    views until ``zero_grad``; where the reduction has another dtype than the parameters, a copy of it in theirs takes its
    place (with replicas the part itself stays until the backward's end). The gradient of a group's last parameter stays until
    the reduction has been asked for: a loop's variable names it. With one rank there is no gather: each parameter is cast and
    copied.
    Gradients are reduced in the last micro batch of a step alone (``set_requires_gradient_sync``), as accelerate, the HF
    Trainer and Lightning have it. The others leave whole gradients, cast to the reduction's dtype, to which the next ones are
    added (``unsharded_accumulated_grad``).
    Where ranks share experts, a block has two groups: its experts are sharded over other ranks than the rest. Both are gathered
    before the block, and the next block's while it runs (``set_modules_to_forward_prefetch``, as torchtitan has it with
    expert parallelism). In the backward the experts are reduced first; the flat inputs of both live until the next block's.
    A shard of another dimension than the first is copied once more on both ways.
    Under CPUOffloadPolicy chunks are copied from the host before they are cast, one by one, and what is reduced goes to the
    host at once; the optimizer steps there.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _fsdp_collectives.py, _fsdp_state.py of torch 2.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from zeroplan.core.buffers import Buffer
from zeroplan.core.saving import Saving
from zeroplan.core.workload import ChunkedHead
from zeroplan.engines.fsdp2.rank import Fsdp2Rank
from zeroplan.engines.torch_step import TorchSchedule
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape, Op, block_of_each

#: Streams of the simulated device: compute, the all-gathers', the reductions', and that of reductions over replicas.
COMPUTE, GATHER, REDUCE, ALL_REDUCE = 0, 1, 2, 3
_NONE = -2  # no module


@dataclass(slots=True)
class Group:
    """The parameters that are gathered together, and the blocks of memory that they have at the moment.

    Attributes:
        params: the parameters, as indices.
        module: the index of the module that ``fully_shard`` was called on; -1 for the root.
        ranks: the ranks that share the parameters.
        last: whether the module has no further group.
        rows: whether the first dimension is sharded.
        input_numel: elements of this rank's chunks, which the gather sends.
        cast_numel: those of them that have another dtype than they are gathered in.
        parameters: the unsharded parameters' blocks.
        output: the gather's output, until it is copied out; -1 for none, as below.
        grads: by parameter, the gradient of this micro batch.
        accumulated: by parameter, the sum of earlier micro batches' gradients, whole.
        reduced: the sharded gradients.
    """

    params: list[int]
    module: int
    ranks: int = 1
    last: bool = True
    rows: bool = True
    input_numel: int = 0
    cast_numel: int = 0
    parameters: list[int] = field(default_factory=list)
    output: int = -1
    grads: dict[int, int] = field(default_factory=dict)
    accumulated: dict[int, int] = field(default_factory=dict)
    reduced: int = -1


class Fsdp2Schedule(TorchSchedule[Fsdp2Rank]):
    """One rank's run. Adapters are sharded with the rest, and the optimizer allocates nothing before its first step."""

    follows_modules = True

    def __init__(self, rank: Fsdp2Rank, tape: ExpandedTape, recorder: Recorder) -> None:
        super().__init__(rank, recorder)
        self.groups: dict[int, Group] = {}
        self.experts: dict[int, Group] = {}  # the second group of blocks whose experts ranks share
        self.order: list[int] = []  # modules of groups, as the forward first meets them
        self.position: dict[int, int] = {}
        self.in_backward = False
        self.reduces = True  # whether this micro batch's backward reduces gradients
        self.casts_grads = rank.reduce_bytes != rank.param_bytes
        self.kept_output: int = -1  # the forward's last all-gather output
        self.reduce_inputs: list[int] = []
        self.all_reduced: list[int] = []  # parts in the reduction's dtype
        self.made_numel = _gradients(tape) if rank.layout.tp > 1 else {}
        self.root_module = next((i for i, m in enumerate(tape.modules) if m.parent < 0), -1)
        self.tail: set[int] = set()  # the modules that accelerate makes one unit: final norm, head, and an embedding tied to it
        self.tail_entered = False
        self._group(tape)

    def _group(self, tape: ExpandedTape) -> None:
        rank = self.rank
        one = rank.workload.loop.one_unit
        self.home = [-1] * len(tape.params) if one else block_of_each(tape.modules, len(tape.params))
        for p, home in enumerate(self.home):
            if p in rank.ignored:
                continue
            if p in rank.shared_experts:
                experts = Group([], home, rank.layout.expert_shard_group, rows=not rank.expert_dimension)
                self.experts.setdefault(home, experts).params.append(p)
            else:
                self.groups.setdefault(home, Group([], home, rank.ranks)).params.append(p)
        for module in self.experts:
            self.groups[module].last = False
        for group in (*self.groups.values(), *self.experts.values()):
            group.input_numel = sum(rank.chunks[p] for p in group.params)
            group.cast_numel = sum(rank.chunks[p] for p in group.params if rank.width(p) != rank.param_bytes)
        self.ahead = _followers(sorted(self.groups)) if self.experts else {}
        self.root = self.groups.get(-1)
        if self.root is not None and self.rank.workload.loop.accelerate_units:
            held = set(self.root.params)
            self.tail = {index for index, module in enumerate(tape.modules) if held.intersection(module.params)}
        # A head that nobody calls as a module, as TRL's and Liger's: no hook waits for the gradient of its output.
        entered = {arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.ENTER}
        self.tail_hooked = self.tail <= entered and not self.rank.workload.has(ChunkedHead)

    # --- building ---------------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Allocate the shards on the GPU, those of a tied parameter twice; under CPUOffloadPolicy they are on the host.

        A quantised base is whole on the GPU first, with all that stands beside it.
        """
        if self.rank.offload:
            return
        if self.rank.quant_states:
            self._shard_made_model()
            return
        made: set[int] = set()
        for owned in self.rank.parameters.modules:
            for p in owned:
                block = self.alloc(self.rank.width(p) * self.rank.chunks[p], Buffer.PARAM_SHARD, note=p)
                if p in made:
                    self.free(block)
                made.add(p)

    def _shard_made_model(self) -> None:
        """Make the whole model on the GPU, then shard its parameters, block by block and the root's last.

        Source: _fsdp_param.py, _init_sharded_param; _fully_shard.py, fully_shard
        """
        rank = self.rank
        whole = {p: self.alloc(rank.width(p) * count, Buffer.PARAM_FULL, note=p) for p, count in enumerate(rank.numel)}
        for nbytes in rank.quant_states:
            self.alloc(nbytes, Buffer.PARAM_FULL)
        for group in sorted(self.groups.values(), key=lambda group: group.module < 0):
            for p in group.params:
                self.alloc(rank.width(p) * rank.chunks[p], Buffer.PARAM_SHARD, note=p)
            for p in group.params:  # fully_shard's list of them goes when it returns
                self.free(whole[p])

    def groups_of(self, module: int) -> tuple[Group, ...]:
        """Return a module's groups, in the order in which they are gathered."""
        return tuple(found[module] for found in (self.groups, self.experts) if module in found)

    # --- unshard, reshard -------------------------------------------------------------------------------------------------

    def _unshard(self, group: Group, stream: int = GATHER) -> None:
        """FSDPParamGroup.unshard: casts the chunks of another dtype into a flat input and all-gathers all of them. One rank has
        no gather.
        """
        if group.output >= 0 or group.parameters or group.ranks == 1:
            return
        width = self.rank.param_bytes
        if self.rank.offload:
            source = [self._from_host(p, stream=stream) for p in group.params]
        else:
            casts = [width * group.cast_numel] if group.cast_numel else []
            source = [self.alloc(nbytes, Buffer.COMM_ALL_GATHER, stream=stream, note=group.module) for nbytes in casts]
        group.output = self.alloc(
            width * group.input_numel * group.ranks, Buffer.COMM_ALL_GATHER, stream=stream, note=group.module
        )
        self.recorder.free_all(source)

    def _from_host(self, p: int, *, stream: int = COMPUTE) -> int:
        """Allocate a chunk's copy from the host, in the gather's dtype (_fsdp_param.py, all_gather_inputs)."""
        rank = self.rank
        copied = self.alloc(rank.width(p) * rank.chunks[p], Buffer.STAGE_H2D, stream=stream, note=p)
        if rank.param_bytes == rank.width(p):
            return copied
        cast = self.alloc(rank.param_bytes * rank.chunks[p], Buffer.COMM_ALL_GATHER, stream=stream, note=p)
        self.free(copied)
        return cast

    def _wait_for_unshard(self, group: Group) -> None:
        """Copy the gather's output into one tensor a parameter (FSDPParamGroup.wait_for_unshard)."""
        if group.parameters:
            return
        rank, width = self.rank, self.rank.param_bytes
        cast, copies = -1, []
        for p in group.params:
            if group.ranks == 1 and (rank.offload or width != rank.width(p)):  # the gather's input outlives one copy
                following = (
                    self._from_host(p)
                    if self.rank.offload
                    else self.alloc(width * rank.numel[p], Buffer.COMM_ALL_GATHER, note=p)
                )
                if cast >= 0:
                    self.free(cast)
                cast = following
            group.parameters.append(self.alloc(width * rank.padded(p), Buffer.PARAM_FULL, note=p))
            if group.ranks > 1 and not group.rows:  # _fsdp_collectives.py, foreach_all_gather_copy_out
                copies.append(self.alloc(width * rank.padded(p), Buffer.COMM_ALL_GATHER, note=p))
        self.recorder.free_all(copies)
        if cast >= 0:
            self.free(cast)
        if self.in_backward:
            self._release_output(group)
        else:
            if self.kept_output >= 0:
                self.free(self.kept_output)
            self.kept_output, group.output = group.output, -1

    def _release_output(self, group: Group) -> None:
        if group.output >= 0:
            self.free(group.output)
            group.output = -1

    def _reshard(self, group: Group) -> None:
        """Free the unsharded parameters (FSDPParamGroup.reshard)."""
        self.recorder.free_all(group.parameters)
        group.parameters.clear()

    def forward_begin(self) -> None:
        """Unshard the root."""
        self.in_backward = False
        self.order.clear()
        if self.root is not None:
            self._unshard(self.root)
            self._wait_for_unshard(self.root)

    def enter(self, module: int) -> None:
        """Unshard a block before its forward; a recomputation finds it unsharded."""
        if module not in self.groups or self.in_backward:
            return
        self.position[module] = len(self.order)
        self.order.append(module)
        for group in self.groups_of(module):
            self._unshard(group)
            self._wait_for_unshard(group)
        for group in self.groups_of(self.ahead.get(module, _NONE)):
            self._unshard(group)

    def exit(self, module: int) -> None:
        """Reshard a block after its forward; after the root's, free the last gather's output as well."""
        if self.in_backward:
            return
        if module == self.root_module:
            self._forward_end()
        if self.rank.reshard:
            for group in self.groups_of(module):
                self._reshard(group)

    def _forward_end(self) -> None:
        if self.kept_output >= 0:
            self.free(self.kept_output)
            self.kept_output = -1
        if self.root is not None and self.rank.reshard and not self.tail:
            self._reshard(self.root)

    def backward_begin(self, boundary: bool) -> None:
        """Unshard the root again, and the last block ahead of its use."""
        self.in_backward, self.tail_entered = True, False
        self.reduces = boundary or not self.rank.accumulates
        if self.root is not None:
            self._unshard(self.root)
            self._wait_for_unshard(self.root)
        if not self.tail:
            self._prefetch_last()

    def _prefetch_last(self) -> None:
        """Unshard the group whose forward ended last, behind those within its module, as experts'."""
        if self.order:
            self._unshard(self.groups[self.order[-1]])

    def _prefetch_unshard(self, position: int) -> None:
        """FSDPParamGroup._backward_prefetch: unshards the groups at this position of the forward's order, the last first."""
        for group in reversed(self.groups_of(self.order[position]) if position >= 0 else ()):
            self._unshard(group)

    def backward_enter(self, module: int) -> None:
        """Unshard a block before its backward, and ahead of its use the one that comes before it in the forward."""
        if module in self.tail and not self.tail_entered:
            self.tail_entered = True
            if self.tail_hooked:
                self._prefetch_last()
        if module not in self.groups or module < 0:
            return
        for group in self.groups_of(module):
            self._unshard(group)
            self._wait_for_unshard(group)
        self._prefetch_unshard(self.position.get(module, 0) - 1)

    # --- post-backward ----------------------------------------------------------------------------------------------------

    def grad(self, param: int, handle: int) -> None:
        """Keep a whole gradient for its group's post-backward; autograd adds it to one of its own dtype at once."""
        group = (self.experts if param in self.rank.shared_experts else self.groups)[self.home[param]]
        if param in group.accumulated and not self.casts_grads:
            self.free(handle)
        else:
            group.grads[param] = handle

    def backward_exit(self, module: int) -> None:
        """Run the post-backward of a block."""
        for group in reversed(self.groups_of(module) if module >= 0 else ()):
            self._post_backward(group)

    def _post_backward(self, group: Group) -> None:
        """FSDPParamGroup.post_backward: accumulates, reshards, and reduce-scatters what this micro batch is to reduce."""
        for p in [p for p in group.grads if p in group.accumulated]:
            self.free(group.grads.pop(p))
        self._reshard(group)
        if not self.reduces:
            self._keep_unsharded(group)
            return
        if group.last:
            self._free_reduce_inputs()
        found = group.accumulated | group.grads
        if not found:
            return
        width, rank = self.rank.reduce_bytes, self.rank
        unreached = rank.parameters.unreached
        count = sum(rank.chunks[p] for p in group.params if rank.parameters.trainable[p] and p not in unreached)
        named = found[max(found)] if group.ranks > 1 else -1  # a loop's variable in foreach_reduce
        copied = group.ranks > 1 and not group.rows
        for p in sorted(found) if copied else ():
            whole, found[p] = found[p], self._copy_of_gradient(group, p)
            if whole != named:
                self.free(whole)
        self.reduce_inputs.append(self.alloc(width * count * group.ranks, Buffer.COMM_REDUCE_SCATTER, note=group.module))
        for handle in found.values():
            if handle != named:
                self.free(handle)
        group.accumulated.clear()
        group.grads.clear()
        reduced = self._reduced(count, group.module)
        if named >= 0:
            self.free(named)
        if self.rank.offload or group.reduced >= 0:
            self.free(reduced)  # a copy on the host replaces it; or it is added to what an earlier micro batch reduced
        else:
            group.reduced = reduced

    def _reduced(self, count: int, module: int) -> int:
        """Allocate this rank's part of the reduced gradients, and where the reduction has another dtype its copy in the
        parameters' own, in whose place the part goes (_to_dtype_if_needed).
        """
        rank = self.rank
        if rank.reduce_bytes == rank.original_bytes:
            return self.alloc(rank.original_bytes * count, Buffer.GRAD_SHARD, stream=REDUCE, note=module)
        part = self.alloc(rank.reduce_bytes * count, Buffer.COMM_REDUCE_SCATTER, stream=REDUCE, note=module)
        replicated = rank.layout.dp_replicate > 1
        cast = self.alloc(
            rank.original_bytes * count, Buffer.GRAD_SHARD, stream=ALL_REDUCE if replicated else REDUCE, note=module
        )
        if replicated:
            self.all_reduced.append(part)  # AllReduceState, until finalize_backward
        else:
            self.free(part)
        return cast

    def _keep_unsharded(self, group: Group) -> None:
        """FSDPParam.to_accumulated_grad_if_needed: gradients of another dtype are cast to the reduction's, in the order of the
        parameters.
        """
        for p, handle in sorted(group.grads.items()):
            if self.casts_grads:
                cast = self.alloc(self.rank.reduce_bytes * self.made_numel.get(p, self.rank.numel[p]), Buffer.GRAD_FULL, note=p)
                self.free(handle)
                handle = cast
            group.accumulated[p] = handle
        group.grads.clear()

    def _copy_of_gradient(self, group: Group, p: int) -> int:
        """Copy a whole gradient into the order of the ranks' parts."""
        width = self.rank.reduce_bytes if p in group.accumulated else self.rank.param_bytes
        return self.alloc(width * self.rank.numel[p], Buffer.COMM_REDUCE_SCATTER, note=p)

    def _free_reduce_inputs(self) -> None:
        self.recorder.free_all(self.reduce_inputs)
        self.reduce_inputs.clear()

    def backward_end(self, boundary: bool) -> None:
        """Run the post-backward of groups whose inputs need no gradient, and of the root."""
        for module in reversed(self.order):
            for group in reversed(self.groups_of(module)):
                if group.grads or group.parameters:
                    self._post_backward(group)
        if self.root is not None:
            self._post_backward(self.root)
        self._finalize_backward()

    def _finalize_backward(self) -> None:
        """Free what reductions that are under way need (FSDPState._root_post_backward_final_callback)."""
        self._free_reduce_inputs()
        self.recorder.free_all(self.all_reduced)
        self.all_reduced.clear()

    def step(self, applied: bool) -> None:
        """Clip, step this rank's chunks and free their gradients (``zero_grad``); with offload all of this is on the host."""
        if self.rank.offload:
            return
        self.step_optimizer(applied)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Free the sharded gradients."""
        for group in (*self.groups.values(), *self.experts.values()):
            if group.reduced >= 0:
                self.free(group.reduced)
                group.reduced = -1

    def save(self) -> None:
        """Gather one tensor after another for a full state dict; parts on the host come to the GPU first."""
        saving = self.rank.workload.technique(Saving)
        for part, whole in self.rank.gathered(saving) if saving is not None else ():
            copied = self.alloc(part, Buffer.STAGE_H2D) if part else -1
            self.free(self.alloc(whole, Buffer.COMM_ALL_GATHER))
            if part:
                self.free(copied)


def _followers(modules: Sequence[int]) -> dict[int, int]:
    """Return the block that runs after each; the root, -1, is none."""
    blocks = [module for module in modules if module >= 0]
    return dict(pairwise(blocks))


def _gradients(tape: ExpandedTape) -> dict[int, int]:
    """Elements of each parameter's gradient as autograd makes it.

    DTensor makes the gradient of an embedding that is split by rows whole on every tensor-parallel rank, and it adds up so;
    its part is taken when it is reduced.
    """
    size, grad = tape.storage_bytes, int(Op.GRAD)
    made = ((arg, size[aux]) for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True) if op == grad)
    return {param: nbytes // tape.params[param].itemsize for param, nbytes in made}
