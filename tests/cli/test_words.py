"""Words that do not go together, and outputs that cannot be written: one line, exit code 2, for every verb."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import PATIENCE

LLAMA = "meta-llama/Llama-3.2-1B"
Cli = Callable[..., tuple[int, str, str]]

#: Words → text that the one line must hold.
CASES: list[tuple[list[str], str]] = [
    (["estimate", LLAMA, "--gpus", "3.5"], "--gpus"),
    (["estimate", LLAMA, "--gpus"], "--gpus"),
    (["estimate", LLAMA, "one", "two"], "unexpected"),
    (["check", "ds.json", "--gpus", "0"], "--gpus"),
    (["estimate", LLAMA, "--stage", "2", "--check"], "--vram"),
    (["estimate", LLAMA, "--stage", "2", "--timeline", "picture.png"], ".svg"),
    (["estimate", LLAMA, "--stage", "2", "--depth", "formula", "--timeline", "picture.svg"], "formula"),
    (["explain", LLAMA, "--stage", "2", "--time", "--line", "optim.exp_avg"], "--line"),
    (["trace"], "MODEL"),
    (["doctor", "--nvme-path", "/nonexistent"], "--nvme-path"),
    (["doctor", "-o", "profile.json"], "--calibrate"),
    (["recommend", LLAMA, "--vram", "24G", "--form", "trainer"], "-o"),
    (["recommend", LLAMA, "--vram", "24G", "--launcher", "slurm"], "-o"),
    (["recommend", LLAMA, "--vram", "24G", "--form", "trainr", "-o", "ds.json"], "trainer"),
    (["recommend", LLAMA, "--vram", "24G", "--launcher", "srun", "-o", "ds.json"], "slurm"),
    (["recommend", LLAMA, "--vram", "80G", "--engine", "ddp", "-o", "ds.json"], "ddp"),
    (["recommend", LLAMA, "--vram", "80G", "--engine", "zeroplan", "--form", "trainer", "-o", "ds.json"], "explicit"),
    (["recommend", LLAMA, "--vram", "80G", "--engine", "zeroplan", "--launcher", "deepspeed", "-o", "ds.json"], "torchrun"),
    (["recommend", "--vram", "24G", "--html", "page.html"], "--html"),
    (["recommend", "--vram", "24G", "--quantize", "nf4"], "name the model"),
    (["verify", "--format", "xml"], "--format"),
    (["verify", "--timeout", "0"], "--timeout"),
    (["estimate", LLAMA, "--engine", "zeroplan", "--stage", "2", "--offload-optimizer", "cpu", "--optimizer", "lamb"], "LAMB"),
]


@pytest.mark.parametrize(("words", "holds"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_one_line_says_what_and_the_remedy(
    words: list[str], holds: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}")
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert err.startswith("zeroplan: ")
    assert err.count("\n") == 1, err
    assert holds in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json"]  # nothing was written on the way


def test_no_words_at_all_show_the_help(cli: Cli) -> None:
    code, out, err = cli()
    assert (code, out) == (2, "")
    assert "recommend" in err


def test_trace_of_ddp_needs_no_stage(cli: Cli) -> None:
    code, out, err = cli("trace", LLAMA, "--engine", "ddp", "--dtype", "fp32", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["schema"] == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "zeroplan", "estimate", "--params", "1B", "--stage", "2"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "No space left" in ended.stderr


def test_a_reader_that_goes_away_is_no_misfit() -> None:
    """Exit code 1 would say that nothing fits; a shell reports 128 + SIGPIPE of any program whose reader left."""
    words = [sys.executable, "-m", "zeroplan", "estimate", "--params", "1B", "--stage", "2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.wait(PATIENCE) == 141
        assert running.stderr.read() == ""
