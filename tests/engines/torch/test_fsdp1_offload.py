"""FSDP 1's CPUOffload: parts, their gradients and states on the host, whole units on the GPU for a while."""

from __future__ import annotations

import pytest

import zeroplan
from tests.engines.deepspeed.llama_tape import CONFIG, llama_tape
from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.engines.simulation import Simulation
from zeroplan.models.load import load_model

TAPE = llama_tape(2)
TOTAL, RANKS = TAPE.parameters.total, 2
CPU = {"offload_optimizer": "cpu", "offload_param": "cpu"}


def run(**offload: str) -> Simulation:
    case = Case(load_model(dict(CONFIG)), Workload.of(seq_len=16), Cluster.of(gpus=RANKS), ZeroConfig.of(3, **offload))
    return find_engine("fsdp").simulate(case, TAPE)


def test_between_steps_the_gpu_holds_nothing() -> None:
    here, there = run(), run(**CPU)
    assert here.held_after(Phase.STEP) == pytest.approx(16 * TOTAL / RANKS, rel=0.03)  # gradients stay until the next forward
    assert there.held_after(Phase.STEP) < 65 << 20  # cuBLAS's workspaces


def test_the_host_has_a_gradient_for_each_part() -> None:
    phases = {one.phase: one.kept for one in run(**CPU).host}
    step = phases[Phase.STEP]
    assert step[Buffer.PARAM_SHARD, Place.PINNED] == step[Buffer.GRAD_SHARD, Place.PINNED] >= 4 * TOTAL / RANKS
    assert step[Buffer.OPTIM_EXP_AVG, Place.DRAM] == pytest.approx(4 * TOTAL / RANKS, rel=0.01)


def test_reduced_gradients_wait_for_the_backwards_end() -> None:
    marks = {mark.name: mark for mark in run(**CPU).timeline.marks}
    backward = [mark for name, mark in marks.items() if name.startswith("bwd")][-1]
    assert backward.peak >= 4 * TOTAL / RANKS
    assert backward.allocated < 65 << 20


def test_a_quantised_base_fits_two_small_cards() -> None:
    """Answer.AI's case: 70 billion parameters in NF4, LoRA, on two cards of 24 GB."""
    asked = {"engine": "fsdp", "gpus": 2, "gpu": "RTX4090", "lora_rank": 16, "quantize": "nf4", "seq_len": 512}
    plan = zeroplan.estimate(
        "meta-llama/Llama-2-70b-hf", stage=3, gradient_checkpointing=True, depth="formula", **asked, **CPU
    )[0]
    assert plan.gpu.model_states < 2 << 30
    assert 4 * 69e9 / 8 * 2 < plan.cpu.pinned < 4 * 69e9  # the base, and as much for gradients that never come


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"gpus": 2, "offload_optimizer": "cpu"}, "together"),
        ({"gpus": 1, **CPU}, "one rank shards nothing"),
        ({"gpus": 2, "stage": 0, **CPU}, "needs stage 3"),
    ],
)
def test_what_is_not_modelled_is_one_line(asked: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        zeroplan.estimate("openai-community/gpt2", engine="fsdp", depth="formula", **{"stage": 3, **asked})


def test_the_way_out_of_fsdp2s_refusal_works() -> None:
    asked = {"quantize": "nf4", "lora_rank": 8, "gpus": 2, "depth": "formula", **CPU}
    with pytest.raises(BadInput, match="use --engine fsdp,"):
        zeroplan.estimate("meta-llama/Llama-3.2-1B", engine="fsdp2", stage=3, **asked)
    assert zeroplan.estimate("meta-llama/Llama-3.2-1B", engine="fsdp", stage=3, **asked)[0].gpu.model_states


def test_it_promises_no_fit() -> None:
    """No GPU has measured it, and a reported run ran out where the figure fits."""
    for offload, fits in ((CPU, None), ({}, True)):
        asked = {"engine": "fsdp", "seq_len": 16, "gpus": RANKS, "gpu": "H200", "cpu_ram": "2T", "stage": 3, **offload}
        (plan,) = zeroplan.estimate("meta-llama/Llama-3.2-1B", **asked)
        assert plan.fits is fits
