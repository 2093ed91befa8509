"""A live module and a batch: run by ranks of its own, held against the plan of a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroplan
from tests.conftest import ROOT
from tests.validate.plain import Classifier, batch
from zeroplan.core.errors import BadInput
from zeroplan.validate.live import RANK, live_module, require_no_rank
from zeroplan.validate.results import Drift

pytestmark = [pytest.mark.torch]


_SCRIPT = """
import torch
import zeroplan
from tests.validate.plain import Classifier, batch

class Mine(Classifier):
    pass

if __name__ == "__main__":
    module = Mine()
    module.table.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    print(zeroplan.verify(module, inputs=batch(), gpus=2, stage=3, progress=lambda text: None).to_json())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())  # ranks have copies
"""


@pytest.mark.slow
def test_a_module_of_the_users_own_script_on_two_ranks(tmp_path: Path, warm_python: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([warm_python, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    drift = Drift.model_validate_json(done.stdout)
    assert drift.within, drift
    (one,) = drift.comparisons
    assert one.plan.depth == "simulated"
    assert one.measurement.owned
    assert one.measurement.ranks == 2
    assert (drift.model.name, drift.workload["micro_batch"], drift.workload["seq_len"]) == ("Mine", 16, 32)
    assert drift.model.params - drift.model.trainable == 300 * 40
    peak = next(row for row in one.totals if row.name == "peak of tensors")
    assert peak.judged
    assert abs(peak.measured - peak.planned) < 0.01 * peak.planned


class Lambda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.double = lambda x: 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.double(self.layer(x))


def local() -> nn.Module:
    class Local(nn.Linear):
        pass

    return Local(3, 3)


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (Lambda(), {"inputs": X}, "cannot be handed to other processes"),
        (local(), {"inputs": X}, "run the script by torchrun, where every rank builds the module itself"),
        (nn.Linear(3, 3), {}, "Linear has no config to build it from; give inputs=…"),
        (nn.Linear(3, 3), {"inputs": (X, X)}, "too many positional arguments; give the keyword arguments"),
        (nn.Linear(3, 3), {"inputs": {"input": 1}}, "there is no tensor in the batch"),
        (nn.Linear(3, 3), {"inputs": X, "seq_len": 7}, "seq_len: the batch says it"),
        (nn.Linear(3, 3), {"inputs": X, "lora_rank": 4}, "lora_rank: is not done to a live module"),
        (nn.Linear(3, 3), {"inputs": X, "engine": "fsdp2"}, "use ddp or zeroplan"),
        ({"model_type": "llama"}, {"inputs": X}, "inputs are for a live nn.Module"),
    ],
)
def test_what_is_refused(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as fault:
        zeroplan.verify(model, **{"stage": 2, "gpus": 2, "progress": lambda _: None, **options})
    assert said in str(fault.value)


def test_a_rank_that_imports_an_unguarded_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_no_rank()
    monkeypatch.setenv(RANK, "1")
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    with pytest.raises(BadInput, match="while a rank imported the script; call verify"):
        zeroplan.verify(nn.Linear(3, 3), inputs=X)


def test_batches_become_keyword_arguments() -> None:
    module = Classifier()
    named = live_module(module, batch())
    placed = live_module(module, tuple(batch().values()))
    assert named.batch.keys() == placed.batch.keys() == {"tokens", "kind"}
    assert named.shape() == (16, 32)
    assert live_module(nn.Linear(3, 3), X).batch.keys() == {"input"}
    assert live_module(nn.Linear(3, 3), X).batch_on(X.device, torch.bfloat16)["input"].dtype is torch.bfloat16
