"""A curriculum by sequence length: DeepSpeed's own values, both spellings of its keys, cut batches, checkpoints and plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan
import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.curriculum import Curriculum
from zeroplan.core.errors import BadInput
from zeroplan_runtime.config import read_config
from zeroplan_runtime.techniques.curriculum import SequenceCurriculum

pytestmark = [pytest.mark.torch]

SCHEDULES: list[dict[str, Any]] = [
    {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 37, "difficulty_step": 8}},
    {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 48}},
    {"schedule_type": "fixed_root", "schedule_config": {"total_curriculum_step": 50, "difficulty_step": 8, "root_degree": 2}},
    {"schedule_type": "fixed_root", "schedule_config": {"total_curriculum_step": 30, "difficulty_step": 7, "root_degree": 3}},
    {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [16, 64, 200], "max_step": [5, 31]}},
    {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [16, 250, 64], "max_step": [5, 31]}},
]
LENGTHS = {"min_difficulty": 20, "max_difficulty": 200}


def legacy(schedule: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", **LENGTHS, **schedule, **more}}


def later(schedule: dict[str, Any], name: str = "seqlen", **more: Any) -> dict[str, Any]:
    metric = {"difficulty_type": "value", "clustering_type": "single_cluster", **LENGTHS, **schedule, **more}
    learning = {"enabled": True, "data_cluster_path": "unused", "curriculum_metrics": {name: metric}}
    sampling = {"enabled": True, "num_epochs": 1, "curriculum_learning": learning}
    return {"data_efficiency": {"enabled": True, "seed": 1, "data_sampling": sampling}}


def read(config: dict[str, Any]) -> Curriculum:
    found = read_config(config, 1).curriculum
    assert found is not None
    return found


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_lengths_are_those_of_deepspeed_at_every_step(schedule: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    theirs, ours = CurriculumScheduler({**LENGTHS, **schedule}), SequenceCurriculum(read(legacy(schedule)))
    wanted = [theirs.update_difficulty(step) for step in range(1, 120)]
    assert [ours.update(step) for step in range(1, 120)] == wanted
    assert ours.schedule.longest == max(wanted)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_both_spellings_are_one_curriculum_and_the_written_section_too(schedule: dict[str, Any]) -> None:
    found = read(legacy(schedule))
    assert found == read(later(schedule)) == read(later(schedule, "seqlen_truncate"))
    assert found == read({"curriculum_learning": found.as_section()})


def test_what_is_switched_off_is_none() -> None:
    off: list[dict[str, Any]] = [
        {"curriculum_learning": {"enabled": False}},
        {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}},
        {"data_efficiency": {}},
        {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": False}, "data_routing": {"enabled": False}}},
    ]
    assert [read_config(config, 1).curriculum for config in off] == [None] * len(off)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (legacy({"schedule_type": "fixed_linear"}), "schedule_config.total_curriculum_step: fixed_linear needs it"),
        (legacy({"schedule_type": "fixed_lineal"}), "did you mean 'fixed_linear'"),
        (legacy(SCHEDULES[0], curriculum_type="vocab"), "curriculum_learning.curriculum_type: 'vocab' is no curriculum"),
        (legacy(SCHEDULES[0], min_difficulty=300), "min_difficulty: 300 is more than max_difficulty 200"),
        (legacy(SCHEDULES[0], min_difficulty=0), "min_difficulty: 0 is no whole number above zero"),
        (legacy(SCHEDULES[0], max_difficult=9), "key 'max_difficult' is not supported"),
        (
            legacy({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 9], "max_step": [5, 6]}}),
            "one less",
        ),
        (
            legacy({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 9, 10], "max_step": [6, 5]}}),
            "do not rise",
        ),
        (later(SCHEDULES[0], "vocabularyrarity"), "vocabularyrarity: samples are not chosen by a metric"),
        (later(SCHEDULES[0], difficulty_type="percentile"), "difficulty_type: 'percentile' chooses samples by an index"),
        (later(SCHEDULES[0], index_to_sample_path="x"), "key 'index_to_sample_path' is not supported"),
        (later({"schedule_type": "fixed_linear", "schedule_config": 3}), "schedule_config: is not an object"),
        ({"data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}}, "random layerwise token dropping"),
        ({"data_efficiency": {"enabled": "yes"}}, "data_efficiency.enabled: 'yes' is not true or false"),
        ({**legacy(SCHEDULES[0]), **later(SCHEDULES[0])}, "there is one in data_efficiency too"),
    ],
)
def test_what_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as fault:
        read_config(config, 1)
    assert said in str(fault.value)


def test_every_tensor_of_the_sequences_shape_is_cut_and_no_other() -> None:
    curriculum = SequenceCurriculum(Curriculum(4, 8, "fixed_discrete", difficulty=(4, 8), max_step=(2,)))
    tokens, scores = torch.arange(20).reshape(2, 10), torch.rand(2, 3)
    batch = {"input_ids": tokens, "position_ids": torch.arange(10)[None], "scores": scores, "ids": torch.arange(2)}
    (found,), more = curriculum.cut((batch,), {"labels": tokens + 1, "use_cache": False}, 1)
    assert torch.equal(found["input_ids"], tokens[:, :4])
    assert torch.equal(more["labels"], tokens[:, :4] + 1)
    assert found["position_ids"].tolist() == [[0, 1, 2, 3]]
    assert found["scores"] is scores
    assert found["ids"].tolist() == [0, 1]
    assert more["use_cache"] is False
    assert batch["input_ids"] is tokens
    assert more["labels"].is_contiguous()
    assert curriculum.cut((tokens,), {}, 3)[0][0].shape == (2, 8)
    assert curriculum.cut((tokens[:, :5],), {}, 3)[0][0].shape == (2, 5)
    for args, kwargs, said in (
        ((tokens,), {"attention_mask": torch.ones(2, 1, 10, 10)}, r"cut an input of shape \[2, 1, 10, 10\] from 10 to 8"),
        ((tokens,), {"position_ids": torch.arange(10)}, r"shape \[10\]"),
        ((tokens,), {"cu_seq_lens_q": torch.tensor([0, 5, 10])}, "cu_seq_lens_q"),
        ((torch.rand(2, 10),), {}, "whole numbers"),
    ):
        with pytest.raises(BadInput, match=said):
            curriculum.cut(args, kwargs, 3)


CUT = {"min_difficulty": 2, "max_difficulty": 6, "schedule_type": "fixed_discrete"}
SHORT = {**CUT, "schedule_config": {"difficulty": [2, 4, 6], "max_step": [2, 4]}}
WANTED = [2, 2, 4, 4, 6, 6]


def steps(engine: zeroplan_runtime.Engine, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        for micro in range(2):
            losses.append(engine.backward(engine(models.batch(number, micro, 0))).item())
            engine.step()
    return losses


def start(group: dist.ProcessGroup, stage: int, **more: Any) -> zeroplan_runtime.Engine:
    config = ds_config(stage, gradient_accumulation_steps=2, **more)
    return zeroplan_runtime.initialize(model=models.make(0), config=config, group=group, device="cpu")[0]


def train_cut(group: dist.ProcessGroup, stage: int, folder: str) -> dict[str, Any]:
    """A curriculum's losses, those of a run whose batches are cut beforehand, and those after a restart."""
    engine = start(group, stage, **legacy(SHORT))
    losses = steps(engine, 0, 3)
    engine.save_checkpoint(folder)
    losses += steps(engine, 3, 6)
    engine.eval()
    with torch.no_grad():
        whole = engine(models.batch(9, 0, 0)).item()
        plain = engine.module(models.batch(9, 0, 0)).item() if stage < 3 else whole
        shorter = engine(models.batch(9, 0, 0)[:, :6]).item()
    loaded = engine(models.batch(9, 0, 0)).item()  # in evaluation mode, with gradients
    resumed = start(group, stage, **legacy(SHORT))
    resumed.load_checkpoint(folder)
    after = (resumed.curriculum_seqlen(), steps(resumed, 3, 6))
    other, beforehand = start(group, stage), []
    for number, length in enumerate(WANTED):
        for micro in range(2):
            beforehand.append(other.backward(other(models.batch(number, micro, 0)[:, :length])).item())
            other.step()
    return {"losses": losses, "beforehand": beforehand, "after": after, "evaluated": (whole, plain, shorter, loaded)}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_training_is_that_of_cut_batches_and_resumes(pool: RankPool, tmp_path: Path, stage: int) -> None:
    for found in pool.run(2, train_cut, stage, str(tmp_path)):
        assert found["losses"] == found["beforehand"]
        assert found["after"] == (4, found["losses"][6:])
        whole, plain, shorter, loaded = found["evaluated"]
        assert whole == plain != shorter
        assert loaded == pytest.approx(shorter, rel=1e-5)


def test_a_custom_schedule_is_a_function_of_the_step_that_stops_at_the_longest() -> None:
    section = {"min_difficulty": 2, "max_difficulty": 5, "schedule_type": "custom"}
    engine, *_ = zeroplan_runtime.initialize(model=models.make(0), config=ds_config(0, **legacy(section)), device="cpu")
    with pytest.raises(BadInput, match="the custom schedule has no function"):
        engine(models.batch(0, 0, 0))
    with pytest.raises(BadInput, match="by the name seqlen"):
        engine.set_custom_curriculum_learning_schedule({"vocab": lambda step: step})
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 1 + step if step < 6 else 3})
    seen = []
    for number in range(7):
        engine.backward(engine(models.batch(number, 0, 0)))
        engine.step()
        seen.append(engine.curriculum_seqlen())
    assert seen == [2, 3, 4, 5, 5, 5, 5]
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 0})
    assert engine.techniques.curriculum is not None
    engine.techniques.curriculum.load_state_dict(None)
    with pytest.raises(BadInput, match="gives 0 at step 8"):
        engine(models.batch(0, 0, 0))


LLAMA = "meta-llama/Llama-3.2-1B"
FILE = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


def test_a_plan_peaks_at_the_longest_and_leaves_the_fit_open(tmp_path: Path) -> None:
    def plan(seq_len: int, **section: Any) -> Any:
        return zeroplan.estimate(LLAMA, ds_config={**FILE, **section}, engine="zeroplan", vram="80G", seq_len=seq_len)[0]

    section = legacy(SCHEDULES[0], max_difficulty=512)
    found, short = plan(1024, **section), plan(512)
    assert found.gpu.peak_allocated == short.gpu.peak_allocated < plan(1024).gpu.peak_allocated
    assert plan(256, **section).gpu.peak_allocated == plan(256).gpu.peak_allocated
    assert (found.fits, short.fits) == (None, True)
    assert [one.key for one in found.unmodelled] == ["curriculum_learning"]
    assert found.settle == "train until the curriculum's longest step, and read torch.cuda.max_memory_reserved"
    with pytest.raises(BadInput, match="DeepSpeed, which refuses the key; remove it: use data_efficiency"):
        zeroplan.estimate(LLAMA, ds_config={**FILE, **section}, engine="deepspeed")
    with pytest.raises(BadInput, match="curriculum_learning: it is not supported with cp"):
        zeroplan.estimate(LLAMA, ds_config={**FILE, **section}, engine="zeroplan", gpus=2, cp=2)
    with pytest.raises(BadInput, match="a few steps of a curriculum are its shortest"):
        zeroplan.verify(LLAMA, ds_config={**FILE, **section}, engine="zeroplan", seq_len=1024)
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({**FILE, **section}))
    with pytest.raises(BadInput, match="curriculum_learning: what is reserved as the sequences"):
        zeroplan.recommend(LLAMA, source=str(file), engine="zeroplan", vram="80G")
