"""An engine that zeroplan does not know: it is registered by its dotted path, and every verb runs on it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.engines.toy import engine as toy
from zeroplan.api import recommend
from zeroplan.core.buffers import Phase
from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import GPUS
from zeroplan.core.parallel import ParallelLayout
from zeroplan.engines.process import GUESSED_SPREAD
from zeroplan.engines.registry import engine_names, engine_path, find_engine, register, unregister
from zeroplan.ledger.line import Ledger
from zeroplan.planner.estimate import estimate_runs
from zeroplan.run.ask import Ask

Cli = Callable[..., tuple[int, str, str]]
PATH = "tests.engines.toy.engine:Toy"
GPT2 = "openai-community/gpt2"
#: gpt2's elements, and its position and token embeddings with the blocks: all of them are trained.
PARAMS = 124_439_808


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register("toy", PATH)
    yield
    unregister("toy")


def plans(cli: Cli, *words: str) -> list[dict[str, Any]]:
    code, out, err = cli("estimate", GPT2, "--engine", "toy", *words, "--json")
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)["plans"]
    return found


def test_estimate_at_formula_depth(cli: Cli) -> None:
    (plan,) = plans(cli, "--gpus", "4", "--depth", "formula")
    assert (plan["engine"], plan["engine_version"], plan["stage"], plan["depth"]) == ("toy", "1.0", 0, "formula")
    assert plan["gpu"]["model_states"] == 4 * 4 * PARAMS
    assert {line["buffer"] for line in plan["lines"]} >= {"param.full", "grad.full", "optim.exp_avg", "optim.exp_avg_sq"}


def test_estimate_at_simulated_depth(cli: Cli) -> None:
    (plan,) = plans(cli, "--gpus", "4", "--vram", "24G", "--gpu", "H100")
    gpu = plan["gpu"]
    assert plan["depth"] == "simulated"
    assert plan["fits"] is True
    run = estimate_runs(Ask(model=GPT2, engine="toy", gpus=4)).runs[0]
    assert run is not None
    held = run.simulation.held_after(Phase.STEP)
    assert held is not None
    assert (
        3 * 4 * PARAMS <= held < 3 * 4 * PARAMS + 2 * GPUS["h100"].workspace + (16 << 20)
    )  # parameters and states; workspaces and rounding beside
    assert gpu["live_after_step"] == held
    assert gpu["peak_allocated"] > held + 4 * PARAMS
    # Nobody has measured the toy's process, so the interval is wide even on a card whose other engines were.
    assert gpu["interval"][1] - gpu["total"] >= GUESSED_SPREAD


def test_reports_in_every_dress(cli: Cli, tmp_path: Path) -> None:
    page, drawing = tmp_path / "report.html", tmp_path / "line.svg"
    code, out, err = cli("estimate", GPT2, "--engine", "toy", "--html", str(page), "--timeline", str(drawing), "--peak")
    assert (code, err) == (0, "")
    assert "parameters" in out
    assert "toy" in page.read_text()
    assert drawing.read_text().lstrip().startswith("<svg")


def test_explain_and_explain_time(cli: Cli) -> None:
    code, out, _ = cli("explain", GPT2, "--engine", "toy", "--line", "param_full", "--json")
    assert code == 0
    (line,) = json.loads(out)["plans"][0]["lines"]
    assert line["bytes"] == 4 * PARAMS
    assert "params" in line["formula"]
    code, out, _ = cli("explain", GPT2, "--engine", "toy", "--gpus", "4", "--time", "--json")
    assert code == 0
    steps = {item["line"]: item for item in json.loads(out)["plans"][0]["lines"]}
    assert steps["reduce_gradients"]["values"] == {"trainable": PARAMS, "steps_before": 3, "ranks": 4}
    code, out, _ = cli("explain", GPT2, "--engine", "toy", "--gpus", "4", "--time", "--why")
    assert "elements with a gradient" in out


def test_recommend_and_its_files(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "toy.json"
    words = ("--engine", "toy", "--vram", "24G", "--gpus", "2", "--global-batch", "8", "--form", "toy", "-o", str(target))
    code, out, _ = cli("recommend", GPT2, *words, "--json")
    assert code == 0
    best = json.loads(out)["ranking"][0]
    assert best["plan"]["engine"] == "toy"
    assert best["ds_config"] is None
    assert json.loads(target.read_text()) == {"micro_batch": best["micro_batch"], "grad_accum": best["grad_accum"]}
    code, out, _ = cli("recommend", GPT2, *words, "--html", str(tmp_path / "page.html"))
    assert code == 0
    unwrapped = " ".join(out.replace("\\\n", " ").split())
    assert f"torchrun --standalone --nproc-per-node 2 train.py --config {target}" in unwrapped
    assert (tmp_path / "page.html").exists()
    assert cli("recommend", GPT2, *words[:-4], "-o", str(target))[0] == 0
    code, out, err = cli("recommend", GPT2, *words[:-4], "--form", "explicit", "-o", str(target))
    assert (code, out) == (2, "")
    assert "explicit is not a form of toy; use --form toy, or --engine deepspeed or zeroplan" in err
    assert recommend(GPT2, engine="toy", vram="24G")[0].plan.engine == "toy"


def test_trace_and_what_the_toy_refuses(cli: Cli) -> None:
    code, out, _ = cli("trace", GPT2, "--engine", "toy", "--json")
    assert code == 0
    assert json.loads(out)["peak_forward"] > 0
    assert (
        cli("estimate", GPT2, "--engine", "toy", "--stage", "2")[2] == "zeroplan: --stage: toy shards nothing; use --stage 0\n"
    )
    code, _, err = cli("estimate", GPT2, "--engine", "toy", "--ds-config", "any.json")
    assert (code, "toy reads no ds_config" in err) == (2, True)
    assert "did you mean 'toy'" in cli("estimate", GPT2, "--engine", "toi")[2]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_verify_trains_it() -> None:
    from tests.validate.small import CONFIG
    from zeroplan.validate.api import verify

    drift = verify(CONFIG, engine="toy", gpus=1, seq_len=64, progress=lambda _: None)
    assert drift.within, drift
    (one,) = drift.comparisons
    rows = {row.name: row for row in one.rows}
    assert rows["param.full"].difference == rows["optim.exp_avg"].difference == 0
    judged = {row.name: row for row in one.totals}
    assert judged["live after a step"].within
    assert judged["peak of tensors"].within


def test_names_are_registered_once() -> None:
    register("toy", PATH)
    assert engine_path("Toy ") == PATH
    assert isinstance(find_engine("toy"), toy.Toy)
    assert "toy" in engine_names()
    with pytest.raises(ValueError, match="is tests"):
        register("toy", "tests.engines.toy.engine:Other")
    with pytest.raises(ValueError, match="lower-case"):
        register("Toy", PATH)
    unregister("toy")
    with pytest.raises(BadInput, match="unknown engine"):
        find_engine("toy")


def calls() -> list[str]:
    """Every function of zeroplan and of the toy that is running, below the command line's entry."""
    stack = [frame for frame in inspect.stack() if "/zeroplan/" in frame.filename or "toy/engine" in frame.filename]
    names = [f"{Path(frame.filename).stem}.{frame.function}" for frame in reversed(stack)]
    return names[names.index("main.run") + 1 :]


@pytest.mark.parametrize(
    "rank",
    ["deepspeed.rank.DeepSpeedRank", "fsdp2.rank.Fsdp2Rank", "ddp.rank.DdpRank", "runtime.rank.RuntimeRank"],
)
def test_a_parameter_reaches_the_rank_of_every_engine_within_eight_calls(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """``--gpus 8`` on its way from the command line to the object that the ledger's lines read."""
    folder, module, name = rank.split(".")
    kind = getattr(import_module(f"zeroplan.engines.{folder}.{module}"), name)
    make = kind.__init__
    paths: list[list[str]] = []

    def made(self: Any, *args: Any, **rest: Any) -> None:
        paths.append(calls())
        make(self, *args, **rest)

    monkeypatch.setattr(kind, "__init__", made)
    engine = {"runtime": "zeroplan"}.get(folder, folder)
    assert cli("estimate", GPT2, "--gpus", "8", "--engine", engine, "--depth", "formula")[0] == 0
    path = [name for name in paths[0] if name != "case.once" and not name.endswith("<lambda>")]  # a rank is derived once
    assert len(path) <= 8, path


def test_a_parameter_reaches_a_line_within_six_calls(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--gpus 8`` on its way: every function of zeroplan between the command line's entry and the rank, and the line."""
    seen: dict[str, list[str]] = {}
    rank, line = toy.ToyRank, toy.LEDGER[0].fn

    def made(layout: ParallelLayout, **rest: Any) -> toy.ToyRank:
        assert layout.gpus == 8
        seen.setdefault("rank", calls())  # the request's own plan comes first; what would relieve it is planned later
        return rank(layout=layout, **rest)

    def evaluated(c: Any) -> int:
        seen.setdefault("line", calls())
        return line(c)

    monkeypatch.setattr(toy, "ToyRank", made)
    monkeypatch.setattr(toy, "LEDGER", Ledger([replace(toy.LEDGER[0], fn=evaluated), *toy.LEDGER[1:]]))
    plans(cli, "--gpus", "8")
    for name, path in seen.items():
        assert len(path) <= 6, (name, path)
    assert set(seen) == {"rank", "line"}
