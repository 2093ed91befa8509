"""``zeroplan recommend`` and ``zeroplan doctor`` as users call them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zeroplan
from zeroplan.core.digests import DIGESTS
from zeroplan.core.errors import BadInput
from zeroplan.core.rates import read_profile
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.report.recommendation_html import pareto_front
from zeroplan.run.ask import Ask
from zeroplan.search import catalog
from zeroplan.search.catalog import fits_by_bound
from zeroplan.search.machine import preset_of
from zeroplan.search.results import Point
from zeroplan.search.search_options import SearchOptions

Cli = Callable[..., tuple[int, str, str]]
LLAMA = "meta-llama/Llama-3.2-1B"
#: Formula depth keeps these tests independent of torch; what simulation adds is tested in test_search.py.
FAST = ("--depth", "formula")
#: The exit code where nothing is known to fit, as activations are in no figure.
UNKNOWN = 1


def ds_config(stage: int, **changes: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    return config | changes


def write_lines(path: Path, entries: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(entry) if not isinstance(entry, str) else entry for entry in entries))
    return str(path)


def test_the_written_config_is_the_first_row(cli: Cli, tmp_path: Path) -> None:
    out_file = tmp_path / "ds_config.json"
    words = (LLAMA, "--vram", "40G", "--gpus", "4", "--global-batch", "64", "--seq-len", "1024", *FAST)
    code, out, err = cli("recommend", *words, "-o", str(out_file), "--json")
    assert (code, err) == (UNKNOWN, "")
    data = json.loads(out)
    written = json.loads(out_file.read_text())
    best = data["ranking"][0]
    assert written == best["ds_config"]
    read = read_ds_config(written, world_size=4)
    assert read.training.micro_batch == best["micro_batch"]
    assert best["micro_batch"] * best["grad_accum"] * 4 == 64
    assert best["fits"] is None
    assert best["reasons"]
    assert best["plan"]["stage"] == read.zero.stage
    speeds = [r["tokens_per_second"] for r in data["ranking"]]
    assert speeds == sorted(speeds, reverse=True)
    assert best["step_seconds"] * best["tokens_per_second"] == pytest.approx(64 * 1024)


def test_text_names_the_choice_its_reasons_and_how_to_start(cli: Cli, tmp_path: Path) -> None:
    words = ("recommend", LLAMA, "--vram", "40G", "--gpus", "2", *FAST)
    assert cli(*words)[1].count("\n") <= 20
    code, out, _ = cli(*words, "-o", str(tmp_path / "ds.json"), "--why")
    assert code == UNKNOWN
    assert out.startswith("Unknown: nothing is known to fit; best may be DeepSpeed ZeRO-")
    assert "\nWhy ZeRO-" in out
    assert f"deepspeed --num_gpus 2 train.py \\\n    --deepspeed_config {tmp_path / 'ds.json'}" in out
    assert "- set optimizer.params.lr: without it the default of the optimizer holds" in " ".join(out.split())
    assert "128 GiB host (124.0 GiB usable, assumed: --cpu-ram)" in " ".join(out.split())


def test_candidates_are_ranked_as_given(cli: Cli, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "c.jsonl",
        [
            {"ds_config": ds_config(3), "gradient_checkpointing": True},
            {"ds_config": ds_config(0)},
            "",
            {"ds_config": ds_config(2, train_micro_batch_size_per_gpu=4), "gradient_checkpointing": False},
        ],
    )
    code, out, _ = cli("recommend", LLAMA, "--candidates", path, "--gpu", "H100", "--seq-len", "1024", "--json", *FAST)
    ranking = json.loads(out)["ranking"]
    assert code == UNKNOWN
    assert sorted(r["index"] for r in ranking) == [0, 1, 2]
    assert ranking[0]["index"] == 2  # four times the tokens for little more time
    assert ranking[-1]["index"] == 0  # stage 3's hooks and recomputation
    for entry in ranking:
        assert {"index", "fits", "tokens_per_second", "step_seconds", "plan"} <= set(entry)
    stages = {r["index"]: r["plan"]["stage"] for r in ranking}
    assert stages == {0: 3, 1: 0, 2: 2}


def test_a_candidate_is_planned_with_its_settings_for_the_runtime_and_written_with_them(cli: Cli, tmp_path: Path) -> None:
    own = {"ds_config": ds_config(3, zeroplan={"ring": 4})}
    file = write_lines(tmp_path / "c.jsonl", [{"ds_config": ds_config(3)}, own])
    words = (LLAMA, "--engine", "zeroplan", "--gpus", "4", *FAST, "--json")
    code, out, err = cli("recommend", *words, "--candidates", file)
    assert code in (0, 1), err
    by_index = {one["index"]: one for one in json.loads(out)["ranking"]}
    assert "zeroplan" not in by_index[0]["ds_config"]
    assert by_index[1]["ds_config"]["zeroplan"] == {"ring": 4}
    slots = {
        index: sum(line["bytes"] for line in one["plan"]["lines"] if line["buffer"] == "param.full")
        for index, one in by_index.items()
    }
    block = 2 * (2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048)
    assert slots[1] - slots[0] == 2 * block  # two more slots for gathered blocks


def test_the_runtimes_settings_of_a_file_in_use_hold_for_what_is_recommended_in_its_place(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(ds_config(3, zeroplan={"wide_numel": 1 << 30})))
    words = ("--engine", "zeroplan", "--gpus", "2", "--vram", "80G", "--from", str(file), *FAST, "--json")
    code, out, err = cli("recommend", LLAMA, *words)
    assert code == UNKNOWN, err
    data = json.loads(out)
    for one in (data["current"], *data["ranking"]):
        assert one["ds_config"]["zeroplan"] == {"wide_numel": 1 << 30}


def test_candidates_without_a_limit_fit_null(cli: Cli, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", [{"ds_config": ds_config(2)}])
    code, out, _ = cli("recommend", LLAMA, "--candidates", path, "--json", *FAST)
    assert code == 0
    best = json.loads(out)["ranking"][0]
    assert best["fits"] is None
    assert (best["plan"]["verdict"], best["plan"]["decides"]) == ("unknown", "no limit is given")


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        '{"gradient_checkpointing": true}',
        '{"ds_config": {"zero_optimization": {"stage": 9}}}',
        '{"ds_config": {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}}',
        '{"ds_config": {}, "color": 1}',
        '{"ds_config": {}, "gradient_checkpointing": "yes"}',
        "[" * 100_000,
        "",
    ],
)
def test_bad_candidates_are_one_line(cli: Cli, tmp_path: Path, line: str) -> None:
    code, out, err = cli("recommend", LLAMA, "--vram", "24G", "--candidates", write_lines(tmp_path / "c", [line]), *FAST)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        (LLAMA,),
        (LLAMA, "--vram", "24G", "--global-batch", "30", "--gpus", "4"),
        (LLAMA, "--vram", "24G", "--goal", "fame"),
        (LLAMA, "--vram", "24G", "--stage", "3", "--offload-param", "nvme"),
        (LLAMA, "--vram", "24G", "--candidates", "nowhere.jsonl"),
        (LLAMA, "--vram", "24G", "--from", "nowhere.yaml"),
        (LLAMA, "--vram", "24G", "--profile", "nowhere.json"),
        ("--vram", "24G", "--candidates", "x"),
        (LLAMA, "--vram", "24G", "-o", "/nowhere/x.json"),
        (LLAMA, "--vram", "24G", "-o", "x.json", "--form", "toml"),
        (LLAMA, "--vram", "24G", "--format", "pdf"),
        (LLAMA, "--vram", "24G", "--global-batch", "1" + 21 * "0"),
        ("--vram", "24G", "--gpus", "3", "--global-batch", "7"),
    ],
)
def test_bad_requests_are_one_line(cli: Cli, words: tuple[str, ...]) -> None:
    code, _, err = cli("recommend", *words, *FAST)
    assert code == 2
    assert err.startswith("zeroplan: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ({"per_device_train_batch_size": 0}, (), "run.json: per_device_train_batch_size: '0' is no whole number from 1 on"),
        ({"fp16": True}, (), "run.json: bf16 and fp16 are both true; switch one of them off"),
        ({"bf16": "maybe"}, (), "run.json: bf16: 'maybe' is neither true nor false; write true or false"),
        ({"optim": "adam_of_mars"}, (), "run.json: optim: unknown optimizer 'adam_of_mars'; use one of"),
        (
            {"deepspeed": "nowhere.json"},
            (),
            "there is no nowhere.json; put it beside that file, or where the run starts",
        ),
        (
            {"deepspeed": ds_config(2), "per_device_train_batch_size": 4},
            (),
            "run.json: its ds_config: train_micro_batch_size_per_gpu: says 1, HF Trainer 5.17.0 has 4; change one of the two",
        ),
        (
            {"deepspeed": ds_config(2), "per_device_train_batch_size": 1},
            ("--stage", "3"),
            "run.json: its ds_config: zero_optimization.stage: the file says 2, the flags say 3; change one of the two",
        ),
    ],
)
def test_what_a_run_in_use_gets_wrong_is_said_in_its_words(
    cli: Cli, tmp_path: Path, text: dict[str, Any], words: tuple[str, ...], message: str
) -> None:
    said = {"output_dir": "out", "bf16": True, "per_device_train_batch_size": 1} | text
    (tmp_path / "run.json").write_text(json.dumps(said))
    code, _, err = cli("recommend", LLAMA, "--vram", "24G", "--from", str(tmp_path / "run.json"), *words, *FAST)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_machines_share_the_processes(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "acc.json").write_text(json.dumps({"distributed_type": "NO", "num_processes": 3, "num_machines": 2}))
    code, _, err = cli("recommend", LLAMA, "--vram", "24G", "--from", str(tmp_path / "acc.json"), *FAST)
    assert code == 2
    assert "acc.json: num_processes: 3 processes do not divide by 2 machines; write 4" in err


def test_what_the_next_gpu_buys_is_left_out_where_the_batch_cannot_be_split(cli: Cli) -> None:
    words = ("--gpus", "2", "--micro-batch", "2", "--grad-accum", "4", "--global-batch", "16")
    code, out, _ = cli("recommend", LLAMA, "--vram", "24G", *words, *FAST)
    assert code == UNKNOWN
    assert "GPUs a node would" not in out


def test_blocks_that_are_entered_again_early_are_counted() -> None:
    """T5's, whose recomputation begins before the gradients of the block have arrived."""
    found = zeroplan.recommend("google-t5/t5-small", vram="24G", gpus=2, global_batch=16, seq_len=64, explain=False)
    assert found[0].fits


def test_when_nothing_fits_the_nearest_and_the_remedies_are_named(cli: Cli) -> None:
    words = (LLAMA, "--vram", "8G", "--cpu-ram", "6G", "--no-gradient-checkpointing", *FAST)
    code, out, _ = cli("recommend", *words)
    assert code == 1
    assert out.startswith("Nothing fits: nearest is ZeRO-")
    assert " GiB too much. Cheapest change: " in " ".join(out.split())
    assert "1. " in out


def test_a_run_in_use_is_compared(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ds_config(3, gradient_accumulation_steps=8)))
    words = (LLAMA, "--vram", "80G", "--gpus", "2", "--seq-len", "1024", "--from", str(tmp_path / "ds.json"))
    code, out, _ = cli("recommend", *words, *FAST)
    assert code == UNKNOWN
    assert "In use: ZeRO-3" in out
    assert '-{"train_micro_batch_size_per_gpu": 1' in out
    code, out, _ = cli("recommend", *words, *FAST, "--json")
    data = json.loads(out)
    assert data["current"]["plan"]["stage"] == 3
    assert data["workload"]["global_batch"] == 16
    assert data["ranking"][0]["tokens_per_second"] > data["current"]["tokens_per_second"]


def test_the_python_api_gives_the_same(cli: Cli) -> None:
    found = zeroplan.recommend(LLAMA, vram="40G", gpus=4, global_batch=64, seq_len=1024, depth="formula")
    _, out, _ = cli(
        "recommend", LLAMA, "--vram", "40G", "--gpus", "4", "--global-batch", "64", "--seq-len", "1024", "--json", *FAST
    )
    assert found[0].ds_config() == json.loads(out)["ranking"][0]["ds_config"]
    with pytest.raises(BadInput):
        zeroplan.recommend(LLAMA)
    with pytest.raises(TypeError):
        zeroplan.recommend(LLAMA, vram="24G", colour="green")


def test_the_page_shows_the_front(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    code, _, _ = cli("recommend", LLAMA, "--vram", "40G", "--html", str(page), *FAST)
    assert code == UNKNOWN
    text = page.read_text()
    assert text.count("<circle") > 10
    assert ">the card</text>" in text
    places = set(re.findall(r"id='row-(\d+)'", text))
    assert places
    assert set(re.findall(r"<a id='point-(\d+)' href='#row-\1'>", text)) == places
    assert set(re.findall(r"href='#point-(\d+)'", text)) == places
    first = text[text.index("<a id='point-0'") :]
    assert re.match(r"<a [^>]+><circle [^>]+><title>ZeRO-[^<]+</title></circle>", first)
    points = [Point("a", 1, 10.0, True, False), Point("b", 2, 9.0, True, False), Point("c", 3, 11.0, True, False)]
    assert [p.label for p in pareto_front([*points, Point("d", 0, 99.0, False, True)])] == ["a", "c"]


def test_step_times_are_explained(cli: Cli) -> None:
    code, out, _ = cli("explain", LLAMA, "--gpus", "4", "--stage", "2", "--time", "--why")
    assert code == 0
    assert "2 × (matrices − fp8_matrices) × tokens; matmul_tflops = 726.9" in " ".join(out.split())
    code, out, _ = cli("explain", LLAMA, "--gpus", "4", "--stage", "2", "--time", "--json")
    plan = json.loads(out)["plans"][0]
    assert {"gather_updated", "reduce_each_micro_batch", "matmul_backward"} <= {line["line"] for line in plan["lines"]}


def test_doctor_says_what_is_there(cli: Cli) -> None:
    code, out, _ = cli("doctor", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["cores"] >= 1
    assert data["memory"] > 1 << 28
    assert "python" in data
    assert cli("doctor")[0] == 0


def test_doctor_shows_the_machine_for_an_issue(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:True,{Path.home()}/x")
    code, out, _ = cli("doctor", "--report")
    assert code == 0
    assert out.startswith(f"```text\nzeroplan {zeroplan.__version__}\n")
    assert "packages: " in out
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True,~/x" in out
    assert "hf_secret" not in out
    assert str(Path.home()) not in out
    assert cli("doctor", "train.log", "--report")[0] == 2


@pytest.mark.torch
@pytest.mark.slow
def test_calibration_is_kept_and_used(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)  # would be compiled first, for more than half a minute
    path = tmp_path / "profile.json"
    code, _, _ = cli("doctor", "--calibrate", "-o", str(path), "--nvme-path", str(tmp_path))
    assert code == 0
    rates = read_profile(path)["rates"]
    assert {"cpu_adam_gbs", "dram_gbs", "read_gbs", "write_gbs"} <= set(rates)
    assert all(value > 0 for value in rates.values())
    words = (LLAMA, "--vram", "40G", "--profile", str(path), *FAST, "--json")
    code, out, _ = cli("recommend", *words)
    assert code == UNKNOWN
    assert json.loads(out)["rates"]["cpu_adam_gbs"] == rates["cpu_adam_gbs"]


def test_a_profile_of_nonsense_is_refused(cli: Cli, tmp_path: Path) -> None:
    for text in ("[]", "{", '{"rates": {"speed": 1}}', '{"rates": {"hbm_gbs": "fast"}}', '{"rates": {"hbm_gbs": -1}}'):
        (tmp_path / "p.json").write_text(text)
        code, _, err = cli("recommend", LLAMA, "--vram", "24G", "--profile", str(tmp_path / "p.json"), *FAST)
        assert code == 2, text
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32G"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100-40G"),
        ("NVIDIA L40S", "L40S"),
        ("Something Else", ""),
    ],
)
def test_drivers_names_find_their_preset(name: str, preset: str) -> None:
    assert preset_of(name) == preset


def test_a_bare_count_gets_the_activations_of_a_usual_shape(cli: Cli) -> None:
    code, out, _ = cli("recommend", "--params", "7.5B", "--vram", "80G", "--gpus", "8", "--json")
    data = json.loads(out)
    assert code == UNKNOWN
    assert any("usual shape" in text for text in data["warnings"])
    # 7.5B of the GPT-3 kind: hidden 4308, 33 layers; 34 bytes a token, unit and layer, and 16 a token and logit
    tokens = data["ranking"][0]["micro_batch"] * 2048
    assert tokens * (34 * 4308 * 33 + 16 * 65536) < 80 << 30 or data["ranking"][0]["gradient_checkpointing"]
    assert data["ranking"][0]["plan"]["gpu"]["total"] is None


def test_cards_without_bf16_train_in_fp16(cli: Cli) -> None:
    code, out, _ = cli("recommend", LLAMA, "--gpu", "V100-32G", "--gpus", "8", "--json", *FAST)
    data = json.loads(out)
    assert code == UNKNOWN
    assert data["workload"]["dtype"] == "fp16"
    assert data["ranking"][0]["ds_config"]["fp16"] == {"enabled": True}
    assert "bf16" not in data["ranking"][0]["ds_config"]


@pytest.mark.parametrize("engine", ["fsdp2", "ddp", "zeroplan"])
def test_other_engines_are_searched(cli: Cli, engine: str) -> None:
    code, out, _ = cli("recommend", LLAMA, "--vram", "80G", "--gpus", "4", "--engine", engine, "--json", *FAST)
    ranking = json.loads(out)["ranking"]
    assert code == UNKNOWN
    assert {r["plan"]["engine"] for r in ranking} == {engine}
    assert {r["plan"]["stage"] for r in ranking} <= {"fsdp2": {2, 3}, "ddp": {0}}.get(engine, {0, 1, 2, 3})
    assert (ranking[0]["ds_config"] is None) == (engine != "zeroplan")


def test_the_goal_of_memory_needs_least(cli: Cli) -> None:
    words = (LLAMA, "--vram", "80G", "--gpus", "4", "--json", *FAST)
    _, fast, _ = cli("recommend", *words)
    code, small, _ = cli("recommend", *words, "--goal", "memory")
    assert code == UNKNOWN

    def need(text: str) -> int:
        gpu = json.loads(text)["ranking"][0]["plan"]["gpu"]
        return int(max(gpu["phases"].values()))

    assert need(small) < need(fast)
    assert json.loads(small)["ranking"][0]["micro_batch"] == 1


def test_adapters_are_used_when_asked_for(cli: Cli) -> None:
    code, out, _ = cli("recommend", "meta-llama/Llama-3.1-8B", "--vram", "40G", "--lora-rank", "16", "--json", *FAST)
    data = json.loads(out)
    assert code == UNKNOWN
    assert data["model"]["trainable"] < data["model"]["params"] / 100


def test_files_of_each_form_are_written(cli: Cli, tmp_path: Path) -> None:
    beside = {"trainer": "training_arguments.json", "lightning": "trainer.json", "accelerate": "accelerate.yaml"}
    for form, other in beside.items():
        folder = tmp_path / form
        folder.mkdir()
        words = ("--vram", "40G", "--gpus", "2", "--form", form, "-o", str(folder / "ds.json"))
        code, out, _ = cli("recommend", LLAMA, *words, *FAST)
        assert code == UNKNOWN
        assert sorted(p.name for p in folder.iterdir()) == sorted(["ds.json", other, DIGESTS])
        assert "Start it:" in out


def test_the_verdict_is_the_first_line_and_quiet_leaves_the_rest_out(cli: Cli) -> None:
    words = ("recommend", LLAMA, "--gpu", "2xA100-40G", "--seq-len", "1024", "--micro-batch", "1")
    code, out, _ = cli(*words, "--why")
    assert code == 0
    head, _, rest = out.partition("\nPeak, in the ")
    found = zeroplan.recommend(LLAMA, gpu="2xA100-40G", seq_len=1024, micro_batch=1)
    best = found.best
    assert best is not None
    gpu = best.plan.gpu
    assert gpu.interval is not None
    assert f"{best.tokens_per_second:,.0f} tokens/s" in " ".join(head.split())
    assert f"(at most {gpu.interval[1] / 2**30:.1f})" in " ".join(head.split())
    assert head.startswith(f"Best: DeepSpeed ZeRO-{best.zero.stage}, micro batch 1, ")
    assert cli(*words, "--quiet")[1] == head + "\n"
    following = rest.partition("\nNext: ")[2].partition("\n\n")[0].replace("\\\n", " ").split()
    assert following == ["zeroplan", *words, "--why", "-o", "run/"]
    assert str(found).partition("\n\n")[2] == out.partition("\n\n")[2].removesuffix("\n")


def test_a_folder_that_ends_with_a_slash_is_made(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("recommend", LLAMA, "--vram", "40G", *FAST, "-o", f"{tmp_path / 'new'}/")
    assert (code, err) == (UNKNOWN, "")
    assert (tmp_path / "new" / "ds_config.json").is_file()
    assert cli("recommend", LLAMA, "--vram", "40G", *FAST, "-o", f"{tmp_path / 'no' / 'new'}/")[0] == 2


@pytest.mark.slow
def test_without_a_model_it_says_what_the_card_can_train_here_and_from_python(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One answer for both, which ask the same but for the reasons, which the text has no room for: a verdict that names the
    largest of each method, and a table without empty rows.
    """
    answers: dict[str, catalog.Overview] = {}
    overview = catalog.overview

    def once(request: Ask, options: SearchOptions) -> catalog.Overview:
        asked = repr((request, replace(options, explain=False)))
        if asked not in answers:
            assert not answers, asked
            answers[asked] = overview(request, options)
        return answers[asked]

    monkeypatch.setattr(catalog, "overview", once)
    found = zeroplan.recommend(vram="12G")
    assert found.overview is not None
    code, out, _ = cli("recommend", "--vram", "12G", "-o", str(tmp_path / "ds.json"), "--json")
    assert code == 0
    methods = {row["method"]: [m["params"] for m in row["models"]] for row in json.loads(out)["methods"]}
    assert set(methods) == {"full", "full, offload", "LoRA", "LoRA, offload", "QLoRA"}
    for sizes in methods.values():
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) == 3
    assert methods["full"][0] < methods["full, offload"][0] <= methods["LoRA, offload"][0]
    assert 14 * methods["full"][0] < 12 << 30
    assert read_ds_config(tmp_path / "ds.json").runs_alone
    assert cli("recommend", "--vram", "12G")[1].count("\n") <= 20
    code, out, _ = cli("recommend", "--vram", "12G", "--why")
    assert code == 0
    before, _, after = out.partition("\nNext: ")
    assert f"{before}\n\n{after.partition(chr(10) * 2)[2]}".rstrip() == str(found)
    assert out.startswith("Trains at most: ")
    sizes = [entry[1] for row in found.overview.rows for entry in row.found[:1] if not row.method.offload]
    assert sizes == sorted(sizes)  # each further method trains a larger model
    for row in found.overview.rows:
        if not row.found:
            continue
        name, _, best = row.found[0]
        assert f"Trained {row.method.how}\n{name.rpartition('/')[2]} " in out
        assert best.fits or fits_by_bound(best.plan)
        assert f"or larger {row.method.how}" in " ".join(before.split()) or best.fits
    quantized = found.overview.rows[-1].found[0][2]
    assert (quantized.workload.quantize, quantized.engine.name) == ("nf4", "ddp")
    assert "QLoRA: --quantize nf4 --engine ddp" in " ".join(out.split())
    assert " - " not in out
    assert max(map(len, out.splitlines())) <= 80
    assert found.best is found[0]


def test_rates_of_several_processes_count_where_several_ranks_run(cli: Cli, tmp_path: Path) -> None:
    """A profile's rates with all ranks active replace those of one process, but for a run on one GPU."""
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps(
            {
                "schema": 1,
                "gpu": "H100",
                "rates": {"launch_us": 20.0, "dram_gbs": 50.0},
                "together": {"ranks": 4, "rates": {"launch_us": 35.0}},
            }
        )
    )
    found = {}
    for gpus in ("1", "4"):
        words = (LLAMA, "--gpu", "H100", "--gpus", gpus, "--profile", str(profile), "--micro-batch", "1", *FAST, "--json")
        found[gpus] = json.loads(cli("recommend", *words)[1])
    assert (found["1"]["rates"]["launch_us"], found["4"]["rates"]["launch_us"]) == (20.0, 35.0)
    assert found["1"]["rates"]["dram_gbs"] == found["4"]["rates"]["dram_gbs"] == 50.0
    assert any(text.endswith("the host's with 4 processes at once") for text in found["4"]["warnings"])
    assert f"rates from {profile}" in found["1"]["warnings"]


@pytest.fixture
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are measured are forked from one that has imported torch, as the pool's ranks are."""
    from tests.runtime.ranks import CONTEXT

    monkeypatch.setattr("multiprocessing.get_context", lambda _: CONTEXT)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("forked_processes")
def test_processes_are_measured_at_the_same_time() -> None:
    """Each waits for the other before a part begins, and the slower one counts. What is a difference of two times may be
    anything on a busy machine.
    """
    pytest.importorskip("transformers")
    from zeroplan.search import calibrate_host

    found = calibrate_host.measure_host(2, "cpu", passes=2)
    assert found.keys() == {"launch_us", "autograd_us", "dispatch_us", "unit_hook_us", "fresh_gbs"}
    assert min(found["launch_us"], found["autograd_us"], found["fresh_gbs"]) > 0


def test_the_slowest_process_counts() -> None:
    from zeroplan.search.calibrate_host import _combined

    one, other = (
        {"launch_us": 20.0, "autograd_us": 6.0, "fresh_gbs": 4.0},
        {"launch_us": 31.0, "autograd_us": 5.0, "fresh_gbs": 3.0},
    )
    assert _combined([one, other]) == {"launch_us": 31.0, "autograd_us": 6.0, "fresh_gbs": 3.0}


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("forked_processes")
def test_a_process_that_dies_ends_the_measurement() -> None:
    from zeroplan.search import calibrate_host

    with pytest.raises(BadInput, match=r"rank \d of 2 ended early"):
        calibrate_host.measure_host(2, "no such device")


def test_what_one_configuration_would_surprise_with_is_said_where_it_is_shown(cli: Cli) -> None:
    words = ("recommend", "openai-community/gpt2", "--vram", "24G", "--gpus", "2", "--engine", "zeroplan", "--stage", "3")
    words += ("--micro-batch", "1", "--depth", "formula", "--json")
    for offload, said in (((), False), (("--offload-param", "nvme", "--nvme", "1T"), True)):
        _, out, _ = cli(*words, *offload)
        assert any("max_in_cpu" in text for text in json.loads(out)["warnings"]) is said


def test_a_full_card_names_the_roomiest_plan_that_is_as_fast(cli: Cli) -> None:
    words = ("recommend", "Qwen/Qwen2.5-0.5B", "--gpu", "2xRTX4090", "--micro-batch", "4")
    best = json.loads(cli(*words, "--json")[1])["ranking"][0]
    assert best["headroom"] < 0.03
    (said,) = [text for text in best["reasons"] if text.startswith("the roomiest as fast is ")]
    plan = "ZeRO-3, checkpointing, micro batch 4 with expandable_segments:True"
    assert said == f"the roomiest as fast is {plan}: it leaves 6 %, and is as fast"
    pins = ("--stage", "3", "--gradient-checkpointing", "--alloc-conf", "expandable_segments:True")
    roomy = json.loads(cli(*words, *pins, "--json")[1])["ranking"][0]
    assert round(100 * roomy["headroom"]) == 6
    assert roomy["tokens_per_second"] >= 0.999 * best["tokens_per_second"]
    assert said in " ".join(cli(*words)[1].split())


@pytest.mark.torch
def test_adapters_that_surely_fit_are_named_where_all_weights_only_may(cli: Cli) -> None:
    """The host is assumed, and too small for 3 B parameters; the lines give what adapters take and how fast they are."""
    asked = ("recommend", "meta-llama/Llama-3.2-3B", "--vram", "12G", "--seq-len", "512")
    _, out, _ = cli(*asked, "--why")
    assert out.startswith("May fit")
    out = " ".join(out.split())
    assert re.search(r"- LoRA .*\(--lora-rank 16\): ZeRO-0, checkpointing.* fits, [\d,]+ tokens/s", out)
    assert re.search(r"- QLoRA.*--quantize nf4.*: DDP, checkpointing.* fits, [\d,]+ tokens/s", out)
    _, out, _ = cli(*asked, "--lora-rank", "16")
    assert out.startswith("Best")
    assert "- LoRA" not in out
