"""``--compile`` in a search: candidates planned and timed compiled, and files that compile what was planned."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.step.case import SHAPES
from benchmarks.step.predict import time_error
from tests.workloads import with_flat
from zeroplan import recommend, scale
from zeroplan.cli.flags import recommend_words
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Compilation
from zeroplan.interop.readers import read_setup
from zeroplan.ledger.work import count_tape
from zeroplan.planner import tapes
from zeroplan.planner.resolve import resolve
from zeroplan.report.layouts import layout_name
from zeroplan.report.recommendation import described
from zeroplan.run.ask import Ask
from zeroplan.search import search_options
from zeroplan.search.files import Target, files_of
from zeroplan.search.layout_answer import LaidOut
from zeroplan.search.layout_counts import rank_counts
from zeroplan.search.results import Recommendation
from zeroplan.tuning import api as tuning
from zeroplan.tuning.results import key_of

TINY: dict[str, Any] = {**SHAPES["toy"], "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
ASKED: dict[str, Any] = {"seq_len": 64, "micro_batch": 2, "gpus": 2, "gpu": "H100", "cpu_ram": "64G", "from_scratch": True}
STEP_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "step"


def test_layouts_of_compiled_blocks_are_those_of_data_parallelism_timed_by_their_graphs() -> None:
    asked = ASKED | {"compile": "blocks", "stage": 3, "gradient_checkpointing": False}
    (best,) = recommend(TINY, layouts=True, **asked)
    assert isinstance(best, LaidOut)
    assert best.layout.dp == 2
    assert "--compile blocks" in best.flags
    assert layout_name(best) == "dp 2, ZeRO-3, compiled blocks"
    compiled, eager = (resolve(best.request.replace(compile=how)) for how in ("blocks", None))
    counts = rank_counts(compiled, {})
    assert counts.traced
    assert counts == count_tape(tapes.ExpandedTapes(compiled.engine).of(compiled.cases[0]))
    assert counts.forward_kernels < count_tape(tapes.ExpandedTapes(eager.engine).of(eager.cases[0])).forward_kernels
    with pytest.raises(BadInput, match="no choice of a search over layouts"):
        recommend(TINY, layouts=True, **asked | {"compile": "auto"})


def test_auto_ranks_compiled_and_eager_and_names_which() -> None:
    found = recommend(TINY, engine="fsdp2", compile="auto", stage=3, gradient_checkpointing=False, **ASKED)
    by_kind = {one.workload.compile: one for one in found}
    assert set(by_kind) == {None, Compilation.BLOCKS}
    compiled, eager = by_kind[Compilation.BLOCKS], by_kind[None]
    # Fewer kernels to issue, and fewer bytes kept for the backward.
    assert compiled.step_seconds < eager.step_seconds
    peaks = [one.plan.gpu.peak_allocated for one in (compiled, eager)]
    assert peaks[0] is not None
    assert peaks[1] is not None
    assert peaks[0] < peaks[1]
    assert compiled.to_dict()["compile"] == "blocks"
    assert "compile" not in eager.to_dict()
    assert "blocks compiled" in described(compiled)
    assert key_of(compiled) != key_of(eager)
    assert "compiled" in str(found)


@pytest.mark.long
def test_auto_checkpoints_within_graphs() -> None:
    found = recommend(TINY, engine="fsdp2", compile="auto", stage=3, gradient_checkpointing=True, **ASKED)
    assert {one.workload.compile for one in found} == {None, Compilation.CHECKPOINTED}


@pytest.mark.long
@pytest.mark.parametrize("how", ["blocks", "model"])
def test_a_fixed_choice_compiles_every_candidate(how: str) -> None:
    found = recommend(TINY, engine="ddp", compile=how, gradient_checkpointing=False, **ASKED)
    assert found.answer is not None
    assert {one.workload.compile for one in found} == {Compilation(how)}
    # Neither was measured under DDP: no row promises to fit.
    assert {one.fits for one in found} == {None}
    assert any("compilation itself" in text for text in found.answer.warnings)


@pytest.mark.long
def test_checkpointed_blocks_are_compiled_and_points_of_a_scale() -> None:
    found = recommend(TINY, engine="fsdp2", compile="checkpointed-blocks", stage=3, **ASKED)
    assert {one.workload.gradient_checkpointing for one in found} == {True}
    fixed: dict[str, Any] = {"stage": 2, "micro_batch": 2, "gradient_checkpointing": False}
    points = scale(TINY, [1, 2], engine="fsdp2", compile="blocks", seq_len=64, gpu="H100", cpu_ram="64G", **fixed).points
    assert {point.shown.workload.compile for point in points} == {Compilation.BLOCKS}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"engine": "deepspeed"}, "not planned under deepspeed"),
        ({"engine": "fsdp2", "depth": "formula"}, "at formula depth"),
        ({"engine": "fsdp2", "source": {"output_dir": "o"}}, "a choice of the search's own"),
    ],
)
def test_what_no_search_can_compile_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as error:
        recommend(TINY, compile="auto", **{**ASKED, **fields})
    assert said in str(error.value)
    with pytest.raises(BadInput, match=r"use one of blocks, checkpointed-blocks, model, auto$"):
        recommend(TINY, compile="foo", engine="fsdp2", **ASKED)
    with pytest.raises(BadInput, match="let the search checkpoint"):
        recommend(TINY, compile="checkpointed-blocks", engine="fsdp2", gradient_checkpointing=False, **ASKED)
    with pytest.raises(BadInput, match="a bare count"):
        recommend(None, params=10**8, compile="blocks", engine="fsdp2", vram="24G")
    with pytest.raises(BadInput, match="name the model"):
        recommend(None, compile="blocks", engine="fsdp2", vram="24G")


def test_auto_goes_on_without_graphs_where_a_block_cannot_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise tapes.NoTapeError("its block takes a cache")

    monkeypatch.setattr(search_options, "expanded_tape_of", refuses)
    found = recommend(TINY, engine="fsdp2", compile="auto", **ASKED)
    assert found.answer is not None
    assert "nothing is compiled: its block takes a cache" in found.answer.warnings
    assert {one.workload.compile for one in found} == {None}
    assert found[0].fits is True


@pytest.mark.long
def test_the_source_of_a_search_keeps_what_it_compiles() -> None:
    file = {"output_dir": "o", "learning_rate": 1e-4, "bf16": True, "torch_compile": True, "fsdp": "full_shard"}
    file |= {"fsdp_config": {"version": 2}, "per_device_train_batch_size": 2}
    given = {name: value for name, value in ASKED.items() if name != "micro_batch"}
    given |= {"gradient_checkpointing": False, "micro_batch": 2}
    kept = recommend(TINY, source=file, engine="fsdp2", **given).answer
    assert kept is not None
    assert kept.current is not None
    assert kept.current.workload.compile is Compilation.MODEL
    assert {one.workload.compile for one in kept.ranking} == {Compilation.MODEL}
    other = recommend(TINY, source=file, engine="deepspeed", **given).answer
    assert other is not None
    assert {one.workload.compile for one in other.ranking} == {None}
    assert "torch_compile" in {one.key for one in other.ranking[0].plan.unmodelled}


@functools.cache
def searched(engine: str, how: str) -> Recommendation:
    return recommend(TINY, engine=engine, compile=how, gradient_checkpointing=True, **ASKED)[0]


def best_of(engine: str, how: str) -> Recommendation:
    """What a search for another compilation recommends, as far as files tell; each search would trace a tape of its own."""
    one = searched(engine, "blocks")
    return replace(one, workload=with_flat(one.workload, compile=Compilation(how)))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zeroplan", "fsdp2", "ddp"])
def test_files_are_those_of_a_search_for_each_compilation(engine: str) -> None:
    for how in ("checkpointed-blocks", "model"):
        mine, wanted = (written(make(engine, how), new_script="train.py").texts for make in (best_of, searched))
        assert mine["train.py"].count("compile") == wanted["train.py"].count("compile") > 0
        assert searched(engine, how).workload.compile is Compilation(how)


def written(one: Recommendation, **target: Any) -> Any:
    from zeroplan.core.cluster import Cluster
    from zeroplan.interop.forms.configuration import Model

    model = Model("toy", "AutoModelForCausalLM")
    return files_of(one, Cluster.of(gpu="H100", gpus=2), Target(**target), model)


@pytest.mark.parametrize("engine", ["zeroplan", "fsdp2", pytest.param("ddp", marks=pytest.mark.long)])
def test_scripts_compile_what_was_planned(engine: str) -> None:
    calls = {
        "blocks": "        module.compile()",
        "checkpointed-blocks": "    compile_blocks(model)",
        "model": "model.compile()",
    }
    for how, call in calls.items():
        one = best_of(engine, how)
        text = written(one, new_script="train.py").texts["train.py"]
        call = "engine.compile()" if (engine, how) == ("zeroplan", "model") else call
        assert len(re.findall(r"compile(_blocks)?\(", text)) == 1
        assert f"{call}\n" in text
        assert f"{how} compiled" in text
        compile(text, "train.py", "exec")


def test_files_and_sentences_say_what_is_compiled() -> None:
    accelerate: dict[str, Any] = {"output": "run/", "form": "accelerate-fsdp2", "new_script": "run/train.py"}
    with pytest.raises(BadInput, match="their checkpoints within"):
        written(best_of("fsdp2", "blocks"), **accelerate)
    for how in ("checkpointed-blocks", "model"):
        files = written(best_of("fsdp2", how), **accelerate)
        assert read_setup(yaml.safe_load(files.texts["run/accelerate.yaml"])).ask.value("compile") == how
        assert "compile()" not in files.texts["run/train.py"]  # the file does
    for how, call in (
        ("blocks", "block.compile()"),
        ("checkpointed-blocks", "compile_blocks(model)"),
        ("model", "engine.compile()"),
    ):
        said = written(best_of("zeroplan", how), output="run/").program_must
        assert any(call in one for one in said)


def test_the_next_command_carries_it() -> None:
    words = recommend_words(Ask(model="gpt2", gpu="H100", engine="fsdp2", compile="blocks"))
    assert words[words.index("--compile") + 1] == "blocks"


def test_a_tuning_runs_each_candidate_as_it_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="on a CPU"):
        tuning.tune(TINY, compile="auto")
    asked: list[dict[str, Any]] = []

    def verifies(_model: Any, **options: Any) -> Any:
        asked.append(options)
        raise BadInput("stop here")

    monkeypatch.setattr(tuning, "verify", verifies)
    for one in recommend(TINY, engine="fsdp2", compile="auto", stage=3, gradient_checkpointing=False, **ASKED):
        with pytest.raises(BadInput):
            tuning._measured(TINY, one, 2, 3, {"compile": "auto"}, None)
        assert asked[-1]["compile"] == (None if one.workload.compile is None else "blocks")
    assert {options["compile"] for options in asked} == {None, "blocks"}


@pytest.mark.long
@pytest.mark.parametrize("case", ["zeroplan:3+compile", "fsdp2:3+compile"])
def test_measured_steps_of_compiled_blocks(case: str) -> None:
    rows = [json.loads(line) for line in (STEP_RESULTS / "h200_x4_compiled.jsonl").read_text().splitlines()]
    row = next(row for row in rows if (row["case"], row["shape"], row["micro"]) == (case, "llama-1b", 4))
    assert abs(time_error(row)) < 10
