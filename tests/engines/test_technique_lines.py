"""A technique's ledger lines reach the ledger of every engine, whoever reads it."""

from __future__ import annotations

import pytest

from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import Workload
from zeroplan.engines.case import Case
from zeroplan.engines.registry import engine_names, find_engine
from zeroplan.models.load import load_model
from zeroplan.techniques.ema import AverageDevice, Ema, EmaTechnique


@pytest.mark.parametrize("name", engine_names())
def test_every_ledger_has_the_lines_of_its_workloads_techniques(name: str) -> None:
    engine, spec = find_engine(name), load_model("meta-llama/Llama-3.2-1B")
    plain = Workload.of(seq_len=128)
    averaged = plain.with_techniques(Ema(AverageDevice.GPU))
    without, with_average = (engine.ledger(Case(spec, one, Cluster(gpus=2), engine.default()))[0] for one in (plain, averaged))
    assert EmaTechnique.lines
    assert with_average == (*without, *EmaTechnique.lines)
