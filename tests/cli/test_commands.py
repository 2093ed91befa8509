"""The commands' ordinary answers."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

import zeroplan

Cli = Callable[..., tuple[int, str, str]]
LLAMA = "meta-llama/Llama-3.2-1B"


def test_estimate_prints_the_verdict_and_one_table(cli: Cli) -> None:
    words = ("estimate", LLAMA, "--gpus", "8", "--vram", "24G", "--depth", "formula")
    assert cli(*words)[1].count("\n") <= 20
    code, out, err = cli(*words, "--why")
    assert (code, err) == (0, "")
    assert "1,235,814,400 parameters" in out
    assert "24 GiB (23.4 GiB usable)" in " ".join(out.split())
    assert out.startswith("Unknown: ZeRO-1, ")
    rows = [line.split() for line in out.splitlines() if line.lstrip().startswith(("0 ", "1 ", "2 ", "3 "))]
    assert len(rows) == 10
    assert {row[-1] for row in rows[1:]} == {"unknown"}
    assert max(map(len, out.splitlines())) <= 80


def test_wide_shows_all_columns(cli: Cli) -> None:
    words = ("estimate", LLAMA, "--gpus", "8", "--depth", "formula")
    narrow, wide = (cli(*words, *more)[1] for more in ((), ("--wide",)))
    assert "DeepSpeed says" not in narrow
    assert "states  fixed  host (pinned)" in wide
    assert "DeepSpeed says" in wide


def test_the_next_command_asks_the_same(cli: Cli) -> None:
    words = (LLAMA, "--gpu", "4xA100", "--seq-len", "1k", "--lora-rank", "8", "--lora-targets", "q_proj,v_proj")
    out = cli("estimate", *words, "--stage", "2", "--depth", "formula")[1]
    following = out.partition("\nNext: ")[2].partition("\n\n")[0].replace("\\\n", " ")
    expected = ("zeroplan", "recommend", LLAMA, "--seq-len", "1024", *words[5:], "--gpu", "4xA100")
    assert tuple(shlex.split(following)) == expected


def test_names_are_case_insensitive(cli: Cli) -> None:
    assert cli("estimate", LLAMA.lower(), "--depth", "formula")[0] == 0


def test_json_is_one_object(cli: Cli) -> None:
    code, out, _ = cli("estimate", LLAMA, "--json", "--depth", "formula")
    data = json.loads(out)
    assert code == 0
    assert data["schema"] == 1
    assert len(data["plans"]) == 10


def test_csv_and_github_and_html(cli: Cli) -> None:
    _, out, _ = cli("estimate", LLAMA, "--format", "csv", "--depth", "formula")
    rows = list(csv.reader(io.StringIO(out)))
    assert len(rows) == 11
    assert len({len(row) for row in rows}) == 1
    assert cli("estimate", LLAMA, "--format", "github", "--depth", "formula")[1].count("|") > 50
    assert "<table>" in cli("estimate", LLAMA, "--format", "html", "--depth", "formula")[1]


def test_check_exits_1_when_nothing_fits(cli: Cli) -> None:
    arguments = ("estimate", "meta-llama/Llama-3.1-405B", "--vram", "8G", "--stage", "0", "--check", "--depth", "formula")
    code, out, _ = cli(*arguments)
    assert code == 1
    assert out.startswith("Does not fit: ZeRO-0, ")
    assert cli("estimate", LLAMA, "--vram", "80G", "--stage", "2", "--check")[0] == 0


def test_explain_derives_one_line_with_the_users_numbers(cli: Cli) -> None:
    code, out, _ = cli("explain", LLAMA, "--gpus", "8", "--stage", "2", "--line", "optim.exp_avg")
    assert code == 0
    assert "589.28 MiB = ⌈flat_group / ranks⌉ × state_bytes" in out
    assert "flat_group = 1,235,814,400" in out


def test_explain_names_the_nearest_line(cli: Cli) -> None:
    code, _, err = cli("explain", LLAMA, "--stage", "2", "--line", "optim.exp_avgg")
    assert code == 2
    assert "did you mean 'optim.exp_avg'" in err


def test_explain_takes_the_words_of_estimate(cli: Cli) -> None:
    """A machine changes no line; the allocator's settings change a full card's time, and bad ones are refused."""
    words = ("explain", LLAMA, "--gpus", "2", "--stage", "2")
    machine = ("--cpu-ram", "64G", "--nvme", "1T", "--alloc-conf", "expandable_segments:True")
    assert cli(*words, *machine)[:2] == cli(*words)[:2]
    for more in ((), ("--time",)):
        code, out, err = cli(*words, *more, "--alloc-conf", "expandable:True")
        assert (code, out, err.startswith("zeroplan: --alloc-conf: ")) == (2, "", True)


def test_explain_json(cli: Cli) -> None:
    _, out, _ = cli("explain", LLAMA, "--stage", "3", "--json")
    lines = json.loads(out)["plans"][0]["lines"]
    assert {"line", "buffer", "place", "bytes", "formula", "purpose", "source", "values"} == set(lines[0])


def test_version_and_help(cli: Cli) -> None:
    lines = cli("--version")[1].splitlines()
    assert lines[0] == f"zeroplan {zeroplan.__version__}"
    assert f"torch {metadata.version('torch')}" in lines[2]
    assert lines[3].startswith("CPU kernels: ")
    help_text = cli("--help")[1]
    for verb in ("estimate", "explain", "check"):
        assert verb in help_text


def test_the_same_estimator_by_deepspeeds_names(capsys: pytest.CaptureFixture[str]) -> None:
    from zeroplan import compat

    compat.estimate_zero2_model_states_mem_needs_all_cold(2_851_598_336, num_gpus_per_node=8)
    out = capsys.readouterr().out
    assert "11.29" in out  # 11.287 GiB
    assert "127.48" in out
    compat.estimate_zero3_model_states_mem_needs_all_cold(2_851_598_336, 32_000_000, num_gpus_per_node=8)
    assert "71.71" in capsys.readouterr().out


def test_compat_counts_a_meta_model(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    from zeroplan import compat

    with torch.device("meta"):
        model = torch.nn.Linear(4096, 4096)
    compat.estimate_zero3_model_states_mem_needs_all_live(model, 1, 1)
    assert "16M total params, 16M largest layer params" in capsys.readouterr().out


def test_explain_reaches_what_only_the_schedule_knows(cli: Cli) -> None:
    """Twice the tokens are twice the activations alive at the peak, and the formula says so."""
    found = {}
    for tokens in (4096, 8192):
        _, out, _ = cli("explain", LLAMA, "--stage", "2", "--seq-len", str(tokens), "--line", "activation.temp", "--json")
        (line,) = json.loads(out)["plans"][0]["lines"]
        found[tokens] = line["bytes"]
        assert line["formula"].startswith(f"{line['bytes'] // tokens:,} × micro_batch × seq_len")
    assert found[8192] == pytest.approx(2 * found[4096], rel=1e-3)


def test_the_peak_lists_what_is_alive_by_buffer_and_module(cli: Cli) -> None:
    code, out, _ = cli("estimate", LLAMA, "--stage", "2", "--gpus", "2", "--peak", "--json")
    (plan,) = json.loads(out)["plans"]
    assert code == 0
    assert sum(plan["peak"]["by_buffer"].values()) == plan["gpu"]["peak_allocated"]
    assert any(part["origin"] == "model.layers.3.mlp.up_proj" for part in plan["peak"]["alive"])


def test_a_report_and_a_timeline_are_written_whole(cli: Cli, tmp_path: Path) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "timeline.svg"
    code, _, err = cli("estimate", LLAMA, "--stage", "3", "--html", str(page), "--timeline", str(picture))
    assert (code, err) == (0, "")
    assert page.read_text().startswith("<!doctype html>")
    assert "http" not in page.read_text().replace("http://www.w3.org", "")  # self-contained
    assert picture.read_text().lstrip().startswith("<svg")


def test_the_simulated_plan_fills_every_figure(cli: Cli) -> None:
    _, out, _ = cli("estimate", LLAMA, "--stage", "2", "--gpus", "2", "--gpu", "H100", "--json")
    gpu = json.loads(out)["plans"][0]["gpu"]
    low, high = gpu["interval"]
    assert gpu["live_after_step"] < gpu["peak_allocated"] <= gpu["peak_reserved"] < gpu["total"]
    assert low <= gpu["total"] <= high
    assert gpu["peak_phase"] in gpu["phases"]
    assert gpu["phases"][gpu["peak_phase"]] == gpu["peak_allocated"]
