"""``zeroplan diff``: the lines that moved, and the options that differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zeroplan.report.diff import diff_answers

Cli = Callable[..., tuple[int, str, str]]
ASKED = ("estimate", "openai-community/gpt2", "--gpus", "2", "--vram", "24G", "--stage", "2", "--json")


@pytest.fixture
def answers(cli: Cli, tmp_path: Path) -> dict[str, Path]:
    """An answer, and two whose micro batch and whose stage are others."""
    found = {}
    for name, more in (("a", ()), ("batch", ("--micro-batch", "4")), ("stage", ("--stage", "3"))):
        found[name] = tmp_path / f"{name}.json"
        found[name].write_text(cli(*ASKED, *more)[1])
    return found


def test_lines_and_figures_move_by_what_the_plans_say(answers: dict[str, Path], cli: Cli) -> None:
    code, out, err = cli("diff", str(answers["a"]), str(answers["batch"]), "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["options"] == [{"name": "workload.micro_batch", "a": 1, "b": 4}]
    a, b = (json.loads(answers[name].read_text())["plans"][0] for name in ("a", "batch"))
    figures = {one["name"]: (one["a"], one["b"]) for one in found["figures"]}
    assert figures["GPU: total"] == (a["gpu"]["total"], b["gpu"]["total"])
    largest = found["lines"][0]
    of = [next(one["bytes"] for one in plan["lines"] if one["buffer"] == "activation.temp") for plan in (a, b)]
    assert (largest["name"], largest["a"], largest["b"]) == ("activation.temp (hbm)", *of)
    assert not [one for one in found["lines"] if one["name"].startswith("optim.exp_avg")]
    text = cli("diff", str(answers["a"]), str(answers["batch"]))[1]
    assert text.startswith("stage 2: the GPU's total ")
    assert "by micro batch 1 → 4." in text
    assert cli("diff", str(answers["a"]), str(answers["batch"]), "--quiet")[1].count("\n") == 1


def test_sizes_among_the_options_are_read_as_sizes(cli: Cli, tmp_path: Path) -> None:
    for vram in ("24G", "32G"):
        (tmp_path / f"{vram}.json").write_text(
            cli("estimate", "gpt2", "--vram", vram, "--depth", "formula", "--stage", "1", "--json")[1]
        )
    assert "vram 24.00 GiB → 32.00 GiB" in cli("diff", str(tmp_path / "24G.json"), str(tmp_path / "32G.json"))[1]


def test_another_stage_is_named_and_copies_that_follow_each_other_add_up_in_their_phase(answers: dict[str, Path]) -> None:
    found = diff_answers(str(answers["a"]), str(answers["stage"]))
    assert [(one.name, one.a, one.b) for one in found.options] == [("plan.stage", 2, 3)]
    (held,) = (one for one in found.lines if one.name == "grad.shard (hbm)")
    in_step = [line.bytes for line in found.a.plan.lines if line.buffer == "grad.shard" and "step" in line.phases]
    assert len(in_step) == 2
    assert held.a == sum(in_step)


def test_an_answer_beside_itself_and_files_that_are_none(answers: dict[str, Path], cli: Cli, tmp_path: Path) -> None:
    same = diff_answers(str(answers["a"]), str(answers["a"]))
    assert (same.options, same.figures, same.lines) == ((), (), ())
    assert "no option differs" in cli("diff", str(answers["a"]), str(answers["a"]))[1]
    for text in ("{}", "[]", "3", '{"plans": [{}]}', '{"ranking": [], "model": {}, "workload": {}, "cluster": {}}', "no"):
        (tmp_path / "other.json").write_text(text)
        code, out, err = cli("diff", str(answers["a"]), str(tmp_path / "other.json"))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "other.json" in err


def test_the_best_of_a_ranking_is_compared(answers: dict[str, Path], cli: Cli, tmp_path: Path) -> None:
    ranked = cli("recommend", "openai-community/gpt2", "--gpus", "2", "--vram", "24G", "--depth", "formula", "--json")[1]
    (tmp_path / "ranked.json").write_text(ranked)
    best = json.loads(ranked)["ranking"][0]
    found = diff_answers(str(answers["a"]), str(tmp_path / "ranked.json"))
    named = {one.name: (one.a, one.b) for one in found.options}
    assert named["workload.micro_batch"] == (1, best["micro_batch"])
    assert found.b.plan.gpu.total == best["plan"]["gpu"]["total"]


TRAIN = """deepspeed --num_gpus 4 train.py --model_name_or_path openai-community/gpt2 --deepspeed zero.json \\
    --per_device_train_batch_size 2 --max_seq_length 512 --bf16 True --output_dir out
"""
RECIPE = (
    "model_name_or_path: openai-community/gpt2\nper_device_train_batch_size: 2\nmax_length: 512\nbf16: true\noutput_dir: out\n"
)


def test_files_are_planned_and_their_keys_named(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, stage in (("zero.json", 2), ("zero3.json", 3)):
        Path(name).write_text(json.dumps({"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}))
    Path("a.sh").write_text(TRAIN)
    Path("b.sh").write_text(TRAIN.replace("batch_size 2", "batch_size 8"))
    code, out, err = cli("diff", "a.sh", "b.sh", "--gpu", "4xT4")
    assert (code, err) == (0, "")
    assert "per_device_train_batch_size 2 → 8." in " ".join(out.split())
    assert "activation (hbm)" in out
    code, out, err = cli("diff", "zero.json", "zero3.json", "openai-community/gpt2", "--gpu", "4xT4", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["keys"] == [{"name": "zero_optimization.stage", "a": 2, "b": 3}]
    assert {"name": "plan.stage", "a": 2, "b": 3} in found["options"]
    assert any(one["name"] == "param.full (hbm)" for one in found["lines"])
    Path("a.yaml").write_text(RECIPE)
    Path("b.yaml").write_text(RECIPE + "gradient_checkpointing: true\n")
    code, out, err = cli("diff", "a.yaml", "b.yaml", "--gpu", "T4", "--program", "hf-trainer")
    assert (code, err) == (0, "")
    assert "gradient_checkpointing none → True" in " ".join(out.split())
    Path("a.json").write_text(cli(*ASKED)[1])
    assert cli("diff", "a.json", "a.sh", "--gpu", "4xT4")[0] == 0
    code, out, err = cli("diff", "a.json", "a.json", "--gpu", "T4")
    assert (code, out) == (2, "")
    assert err.startswith("zeroplan: --gpu: both are answers")
