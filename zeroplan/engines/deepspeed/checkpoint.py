"""Saving and resuming under DeepSpeed: what lies beside the run's own buffers on the GPU and on the host.

Paths of sources are those of DeepSpeed 0.19.8 under ``deepspeed/runtime/``.

Note [Checkpoints]
    A checkpoint holds references, no copies: ``torch.save`` brings one storage after another to the host and writes it, so
    a rank needs room for its largest one (torch/serialization.py, _save; torch/csrc/serialization.cpp). The first rank
    writes the model's file, at stages 1 and 2 from the flat group's one storage; every rank writes what its optimizer owns.
    What is on the host or on disk already is written from there. Frozen parameters are copied to the host first, from
    stage 2 on.

    The HF Trainer writes the weights itself, before ``save_checkpoint``. Below stage 3 every rank clones the whole model to its
    host for it (accelerate 1.15, accelerator.py, get_state_dict; deepspeed/checkpoint/utils.py, clone_tensors_for_torch_save),
    at stage 3 the first rank alone, with ``stage3_gather_16bit_weights_on_model_save``; without that key it only calls
    ``save_checkpoint`` (transformers 5.17, trainer.py, save_model). Beside adapters, frozen weights stay out of the checkpoint.
    accelerate's ``save_state`` and Lightning call ``save_checkpoint`` and nothing else.

    A checkpoint is loaded to the host: the model's file by every rank, at stage 3 without parameters, then the rank's own
    file. The copies of frozen parameters stay, as part of what ``load_checkpoint`` returns. Masters are copied in place;
    states are made anew on the device of their masters (torch/optim/optimizer.py, load_state_dict), beside those that
    initialisation made.

    Pretrained weights that transformers reads (``from_pretrained`` without a device) are on the host of every rank before the
    model goes to the GPU. Under ``zero.Init`` every rank maps the files, and the first alone reads them, parameter by
    parameter; the pages read stay mapped until the end. Source: transformers 5.17, modeling_utils.py,
    _load_pretrained_model; integrations/deepspeed.py, _load_state_dict_into_zero3_model
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroplan.core.buffers import Phase
from zeroplan.core.saving import Saver, Saving
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.quantized_base import read_at_once
from zeroplan.engines.saved_files import Written, save_phase
from zeroplan.engines.simulation import CheckpointPhase


@dataclass(frozen=True, slots=True)
class _Owned:
    """Groups that this rank's optimizer steps, divided by where they lie: places in ``stepped_at_once``."""

    gpu: list[int]
    host: list[int]


def checkpoint_phases(
    rank: DeepSpeedRank, *, after_init: int, after_step: int, host_init: int, host_step: int, host_load: int = 0
) -> tuple[CheckpointPhase, ...]:
    """Simulate the host in ``engine.save_checkpoint`` after a step and ``engine.load_checkpoint`` after initialisation. See
    Note [Checkpoints].

    With ``stage3_gather_16bit_weights_on_model_save`` a loop of one's own also calls ``engine.save_16bit_model``.

    Source: engine.py, _save_checkpoint, _save_zero_checkpoint, save_16bit_model, _load_checkpoint, _load_zero_checkpoint;
        zero/stage_1_and_2.py and zero/stage3.py, state_dict, load_state_dict, checkpoint_event_prologue

    Args:
        after_init: bytes allocated on the GPU after initialisation.
        after_step: bytes allocated on the GPU between two steps.
        host_init: bytes of the engine's buffers on the host after initialisation.
        host_step: the same between two steps.
        host_load: the same when the model has been made.
    """
    owned, weights = _owned(rank), rank.param_bytes * rank.before_sharing
    if rank.workload.quantize is not None and not rank.workload.base_on_host:
        weights = read_at_once(rank.numel)
    read = (host_load, weights) if rank.zero.stage == 3 else (host_load + weights, 0)
    return (
        CheckpointPhase(Phase.WEIGHTS, 0, *read),
        _save(rank, owned, after_step, host_step),
        _resume(rank, owned, after_init, host_init),
    )


def _owned(rank: DeepSpeedRank) -> _Owned:
    if not rank.offloads_optimizer:
        return _Owned(list(range(len(rank.stepped_at_once))), [])
    return _Owned(list(range(rank.staying)), rank.in_memory)


def _states(rank: DeepSpeedRank, places: list[int]) -> list[int]:
    """Return the bytes of each tensor of the optimizer's states."""
    return [nbytes for at in places for _, nbytes in rank.states(at)]


def _save(rank: DeepSpeedRank, owned: _Owned, gpu: int, host: int) -> CheckpointPhase:
    """Saving between steps; a run that says nothing of it is taken to call ``save_checkpoint`` itself."""
    saving = rank.workload.technique(Saving) or Saving()
    parts = []
    if saving.optimizer or saving.saver is not Saver.TRAINER or (rank.stage == 3 and not gathers_weights(rank, saving)):
        parts.append(_checkpoint(rank, owned, saving))
    if rank.stage == 3 and gathers_weights(rank, saving):
        gathered = max((sum(rank.whole[p] for p in set(own)) for own in rank.parameters.modules), default=0)
        gpu = max(gpu, gpu - _persistent_bytes(rank) + rank.param_bytes * gathered)
        parts.append(Written(0, rank.param_bytes * (rank.trainable if _adapters_alone(rank, saving) else sum(rank.numel))))
    elif saving.saver is Saver.TRAINER and rank.stage < 3:  # a tied weight is copied once for each owner
        cloned = rank.param_bytes * sum(rank.numel[p] for p in rank.parameters.entries)
        parts.append(Written(cloned, cloned))
    return replace(save_phase(host, *parts), gpu=gpu)


def gathers_weights(rank: DeepSpeedRank, saving: Saving) -> bool:
    """Return whether stage 3 gathers the weights in 16 bits on the first rank's host, module by module."""
    return rank.zero.stage3.gather_16bit_weights_on_model_save and saving.saver in (Saver.LOOP, Saver.TRAINER)


def gathered_by_module(rank: DeepSpeedRank) -> list[list[int]]:
    """Return the bytes of each weight that a save gathers on the GPU, module by module; none where it gathers none."""
    saving = rank.workload.technique(Saving)
    if saving is None or not gathers_weights(rank, saving):
        return []
    every = (dict.fromkeys(own) for own in rank.parameters.modules)
    return [[rank.param_bytes * rank.shards[p] * rank.ranks for p in own] for own in every]


def _adapters_alone(rank: DeepSpeedRank, saving: Saving) -> bool:
    """Return whether frozen weights stay out of what is written (``exclude_frozen_parameters``)."""
    return saving.saver is Saver.TRAINER and any(rank.parameters.adapters)


def _checkpoint(rank: DeepSpeedRank, owned: _Owned, saving: Saving) -> Written:
    """Return what ``engine.save_checkpoint`` takes."""
    zero, w = rank.zero, rank.param_bytes
    masters = [rank.master_bytes * rank.stepped_at_once[at] for at in owned.gpu] if rank.own_masters else []
    storage = max([*masters, *_states(rank, owned.gpu)], default=0)
    module, trained_alone = 0, _adapters_alone(rank, saving)  # the largest storage of the model's file
    if zero.stage < 3:
        trained = [rank.numel[p] for p in rank.trained]
        flat = zero.stage > 0 or rank.flattens
        module = w * max([sum(trained)] if flat else trained, default=0)
        if not trained_alone:
            module = max(module, w * max(rank.frozen_numel, default=0))
    if zero.stage == 0:  # one file has all
        return Written(0, max(storage, module))
    frozen = 0 if trained_alone else _frozen_copies(rank)
    every = max(storage, frozen)
    return Written(every, max(every, frozen + module))


def _resume(rank: DeepSpeedRank, owned: _Owned, gpu: int, host: int) -> CheckpointPhase:
    w, places = rank.param_bytes, [*owned.gpu, *owned.host]
    stepped = sum(rank.stepped_at_once[at] for at in places)
    own = (rank.master_bytes * stepped if rank.own_masters else 0) + sum(_states(rank, places))
    model = w * sum(rank.numel) if rank.zero.stage < 3 else 0
    file = model + own if rank.zero.stage == 0 else _frozen_copies(rank) + max(model, own)
    gathered = _persistent_bytes(rank) if rank.zero.stage == 3 else 0
    return CheckpointPhase(Phase.RESUME, gpu + sum(_states(rank, owned.gpu)) + gathered, host + file)


def _frozen_copies(rank: DeepSpeedRank) -> int:
    """Bytes of what this rank copies of the frozen parameters, where gradients are partitioned (save_frozen_param)."""
    if rank.zero.stage < 2:
        return 0
    return rank.param_bytes * (rank.frozen_sharded if rank.zero.stage == 3 else rank.frozen)


def _persistent_bytes(rank: DeepSpeedRank) -> int:
    """Bytes of the parameters that stay gathered; with one rank they alias their parts unless those are on the host."""
    if rank.ranks == 1 and rank.param_device is OffloadDevice.NONE:
        return 0
    return rank.param_bytes * rank.persistent
