"""Gradients that each backward reduces: of whole ones none wait, and parts add up in place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zeroplan
from tests.engines.deepspeed.llama_tape import CONFIG, llama_tape
from tests.workloads import with_flat
from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.interop.readers import read_setups
from zeroplan.models.load import load_model
from zeroplan.techniques.synced_passes import SyncedPasses, SyncedPassesTechnique

TAPE = llama_tape(2)


def peak(engine: str, accum: int, *techniques: object) -> int:
    work = with_flat(Workload.of(seq_len=16), grad_accum=accum).with_techniques(*techniques)
    case = Case(load_model(dict(CONFIG)), work, Cluster.of(gpus=4), ZeroConfig.of(3))
    return find_engine(engine).simulate(case, TAPE).peak_allocated


@pytest.mark.parametrize("engine", ["fsdp", "fsdp2"])
def test_more_micro_batches_take_no_more(engine: str) -> None:
    one, several = peak(engine, 1), peak(engine, 4)
    reduced = peak(engine, 4, SyncedPasses())
    assert several > 1.2 * one
    assert one <= reduced <= 1.1 * one
    assert peak(engine, 8, SyncedPasses()) == reduced


def test_the_ledger_has_no_whole_gradients() -> None:
    def held(**options: object) -> int:
        plan = zeroplan.estimate(
            "meta-llama/Llama-3.1-8B", engine="fsdp2", gpus=8, stage=3, grad_accum=4, depth="formula", **options
        )[0]
        return sum(line.bytes for line in plan.lines if line.buffer == Buffer.GRAD_FULL)

    assert held() == 4 * 8_030_261_248
    assert held(sync_each=True) == 0


def test_ddp_has_no_such_choice() -> None:
    with pytest.raises(BadInput, match="whether ddp reduces each pass"):
        zeroplan.estimate("openai-community/gpt2", engine="ddp", sync_each=True, depth="formula")


def test_torchtunes_loop_reduces_each(tmp_path: Path) -> None:
    recipe = tmp_path / "full.yaml"
    parts = {
        "model": "torchtune.models.llama3_2.llama3_2_1b",
        "optimizer": "torch.optim.AdamW",
        "dataset": "torchtune.datasets.alpaca_dataset",
        "loss": "torchtune.modules.loss.LinearCrossEntropyLoss",
    }
    lines = [f"{name}:\n  _component_: {component}\n" for name, component in parts.items()]
    recipe.write_text("".join(lines) + "batch_size: 2\ngradient_accumulation_steps: 4\ndtype: bf16\n")
    command = tmp_path / "run.sh"
    command.write_text("tune run --nproc_per_node 4 full_finetune_distributed --config full.yaml\n")
    assert read_setups([command]).ask[SyncedPassesTechnique.sync_each]


def test_the_trainers_key_for_it(tmp_path: Path) -> None:
    arguments = {"model_name_or_path": "openai-community/gpt2", "output_dir": "o", "fsdp": "full_shard", "bf16": True}
    for said in (True, False):
        kwargs = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": said}}}
        (tmp_path / "args.json").write_text(json.dumps(arguments | kwargs))
        assert bool(read_setups([tmp_path / "args.json"], "hf-trainer").ask[SyncedPassesTechnique.sync_each]) is said
