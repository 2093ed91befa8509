"""Saving under FSDP 1: units gathered in full precision, one after another, and what of them goes to the host.

Note [FSDP 1's saves]
    ``state_dict`` unshards each unit in the dtype in which it is kept: first the root, which stays until its blocks are done.
    The full form (``offload_to_cpu``, ``rank0_only``) moves the unit's flat parameter to the first rank's host and frees it on
    the GPU; its parameters are cloned there, and the flat copy goes with the unit. The root's stays to the end, beside the
    clones of all others. The sharded form keeps the unit on the GPU, and copies each parameter's chunk to the host.
    Source: torch 2.13, distributed/fsdp/_state_dict_utils.py (_common_unshard_pre_state_dict_hook, _full_post_state_dict_hook,
    _sharded_post_state_dict_hook), _unshard_param_utils.py (_unshard_fsdp_state_params), _flat_param.py (to_cpu).
    ``optim_state_dict`` gathers, for either form, each state of a unit as a whole: one buffer of the unit's size, and beside it
    this rank's part joined, the last one until the next is there (_optim_utils.py, _allgather_orig_param_states). The full form
    copies it to the first rank's host, the sharded one each parameter's chunk to every rank's.
    Without a StateDictConfig ``state_dict`` is full, on every rank's GPU: each unit's parameters are cloned there before
    it is resharded, the root's last (_full_post_state_dict_hook, ``clone``), and all clones stay until the dict is dropped.
    Scripts that gather by ``model.state_dict()`` and then copy do that (Stanford Alpaca's safe_save_model_for_hf_trainer).
    Without shards (NO_SHARD, or one rank) the full form clones every parameter on the first rank's GPU.
    A tied weight is copied once for each name that it has in the state dict.
"""

from __future__ import annotations

from zeroplan.core.buffers import Buffer
from zeroplan.core.saving import Saving, StateDict
from zeroplan.engines.fsdp.rank import FsdpRank
from zeroplan.simulate.recorder import Recorder


def record_save(rank: FsdpRank, saving: Saving, recorder: Recorder) -> None:
    """Record what saving allocates and frees on the first rank's GPU. See Note [FSDP 1's saves]."""
    alloc = recorder.alloc
    if not rank.sharded:
        recorder.free_all([alloc(rank.width(p) * rank.numel[p], Buffer.PARAM_FULL, note=p) for p in rank.parameters.entries])
        return
    full = saving.state_dict is StateDict.FULL
    clones: list[int] = []
    for unit in [""] if "" in rank.units else _inside(rank, ""):
        if saving.state_dict is StateDict.FULL_GPU:
            _clone(rank, unit, recorder, clones)
        else:
            _unshard(rank, unit, recorder, full=full)
    recorder.free_all(clones)
    if saving.optimizer:
        for unit in rank.trained_units:
            _gather_states(rank, unit, recorder, chunks=not full)


def _inside(rank: FsdpRank, unit: str) -> list[str]:
    """Return the units right inside a unit: of the root its blocks, of a block its adapters' matrices."""
    mixed, added = rank.workload.loop.mixed_units, rank.parameters.adapters
    adapters = {one for one in rank.units if one and added[rank.units[one][0]] and not mixed}
    if unit in adapters:
        return []
    if unit:
        return [one for one in rank.units if one in adapters and one.startswith(f"{unit}.")]
    return [one for one in rank.units if one and one not in adapters]


def _unshard(rank: FsdpRank, unit: str, recorder: Recorder, *, full: bool) -> None:
    """Unshard a unit while those inside it are done. In the full form it is on the host meanwhile."""
    size = rank.bytes_of(unit) * rank.padded(unit)
    whole = recorder.alloc(size, Buffer.PARAM_FULL)
    if full:
        recorder.free(whole)
    for one in _inside(rank, unit):
        _unshard(rank, one, recorder, full=full)
    if full:  # moved back, and resharded
        whole = recorder.alloc(size, Buffer.PARAM_FULL)
    else:
        for p in rank.units[unit]:
            recorder.free(recorder.alloc(rank.width(p) * rank.chunk_of(p), Buffer.PARAM_SHARD, note=p))
    recorder.free(whole)


def _clone(rank: FsdpRank, unit: str, recorder: Recorder, clones: list[int]) -> None:
    """Unshard a unit while those inside it are done, and add clones of its parameters to `clones`."""
    whole = recorder.alloc(rank.bytes_of(unit) * rank.padded(unit), Buffer.PARAM_FULL)
    for one in _inside(rank, unit):
        _clone(rank, one, recorder, clones)
    entries = [p for p in rank.parameters.entries if p in rank.units[unit]]
    clones += [recorder.alloc(rank.width(p) * rank.numel[p], Buffer.PARAM_FULL, note=p) for p in entries]
    recorder.free(whole)


def _gather_states(rank: FsdpRank, unit: str, recorder: Recorder, *, chunks: bool) -> None:
    """Gather each state of a unit into one buffer, one after another."""
    width = rank.original_bytes
    whole = recorder.alloc(width * rank.padded(unit), Buffer.COMM_ALL_GATHER)
    part = -1
    for _ in rank.optimizer.states:
        joined = recorder.alloc(width * rank.shard(unit), Buffer.COMM_ALL_GATHER)
        if part >= 0:
            recorder.free(part)
        part = joined
        for p in rank.units[unit] if chunks else ():
            recorder.free(recorder.alloc(width * rank.chunk_of(p), Buffer.COMM_ALL_GATHER, note=p))
    if part >= 0:
        recorder.free(part)
    recorder.free(whole)
