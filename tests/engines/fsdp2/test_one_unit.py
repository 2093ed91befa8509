"""``fully_shard`` on the model alone: one unit, gathered whole and reduced whole."""

from __future__ import annotations

import math
from dataclasses import replace

from tests.engines.deepspeed.llama_tape import CONFIG, llama_tape
from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.ledger.line import evaluate
from zeroplan.models.load import load_model


def test_the_whole_model_is_gathered_at_once() -> None:
    tape, work = llama_tape(2), Workload.of(seq_len=16)
    numel = sum(math.prod(param.shape) for param in tape.params)
    peaks, full = [], []
    for one in (False, True):
        asked = replace(work, loop=replace(work.loop, one_unit=one))
        case = Case(load_model(dict(CONFIG)), asked, Cluster.of(gpus=2), ZeroConfig.of(3))
        engine = find_engine("fsdp2")
        timeline = engine.simulate(case, tape).timeline
        events = len(timeline.allocated_by_event())
        peaks.append(max(timeline.alive_by_buffer(event).get(Buffer.PARAM_FULL, 0) for event in range(events)))
        full.append(sum(item.bytes for item in evaluate(*engine.ledger(case)) if item.buffer is Buffer.PARAM_FULL))
    assert full[1] == 2 * numel
    assert 0 <= peaks[1] - full[1] < 2**21  # blocks are rounded
    assert peaks[0] < peaks[1]
