"""A reference model beside the trained one at stage 3: a second engine of stage 3 without an optimizer.

TRL builds it under ``deepspeed.zero.Init`` as it did the trained model, and hands it to DeepSpeed before training begins
(TRL 1.16, models/utils.py, prepare_deepspeed). Without an optimizer DeepSpeed has nothing of it but the shards and the hooks
(runtime/engine.py, _configure_zero_optimizer; zero/parameter_offload.py): a trace of its own, as long as its forward, and its
own count of gathered elements. So it gathers ahead as far as ``max_live_parameters`` allows while the trained model's are
there, and no step releases what it keeps.
"""

from __future__ import annotations

from zeroplan.core.buffers import Buffer
from zeroplan.engines.deepspeed.coordinator import Coordinator
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.simulate.recorder import Recorder


def build_reference(rank: DeepSpeedRank, recorder: Recorder) -> list[int]:
    """Make and shard one module of the reference after another; return the second owners of tied parameters."""
    alloc = recorder.alloc
    seen, twins = set[int](), []
    for owned in rank.parameters.modules:
        whole = [alloc(rank.param_bytes * rank.numel[p], Buffer.PARAM_FULL, note=p) for p in owned]
        for p, handle in zip(owned, whole, strict=True):
            part = alloc(rank.param_bytes * rank.shards[p], Buffer.PARAM_REFERENCE, note=p)
            if p in seen:
                twins.append(part)
            seen.add(p)
            recorder.free(handle)
    return twins


def reference_coordinator(rank: DeepSpeedRank, recorder: Recorder, trained: Coordinator) -> Coordinator:
    """Return what gathers the reference's parameters, by the config that its engine has and beside the trained model's."""
    return Coordinator(rank.of_reference(), recorder, trained.module_params, trained.read_by, trained.deferred_frees)
