"""What is not on the machine of a capture: packages that only report, data that the command names, weights of an address."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zeroplan
from tests.capture.test_capture import capture
from zeroplan.capturing.hooks.data_files import _options
from zeroplan.capturing.hooks.exits import install
from zeroplan.capturing.run import capture_command
from zeroplan.core.cluster import Cluster

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm_ranks")

SCRIPT = """
import argparse, json, os, sys, tarfile, urllib.request
import numpy, torch
import comet_ml.integration.pytorch as comet
from neptune import Run
parser = argparse.ArgumentParser()
parser.add_argument("--data_path")
parser.add_argument("--data_dir")
parser.add_argument("--output_dir")
asked = parser.parse_args()
rows = json.load(open(asked.data_path))
assert len(rows) == 4 and rows[0]["instruction"] == "the the the the the the", rows[0]
assert rows[0]["conversations"][0]["from"] == "user"
assert len(open("words.txt").read().split()) == 4 * 6
import requests
assert requests.get("https://nowhere/words.txt").text.split() == ["the"] * 24
with requests.get("https://nowhere/cora.tgz", stream=True) as got, tarfile.open(fileobj=got.raw, mode="r:gz") as archive:
    archive.extractall(".")
assert numpy.genfromtxt("cora/cora.cites", dtype=int).shape == (5429, 2)
with urllib.request.urlopen("https://nowhere/wikitext-2/valid.txt") as got:
    words = got.read().split()
assert (len(words), len(set(words))) == (213_886, 33_277)
assert os.listdir(asked.data_dir) == ["train.txt"]
assert not os.path.exists(asked.output_dir) and not os.path.exists("state.json")
run = Run(project="x")
run["loss"].append(0.5)
with comet.Experiment() as experiment:
    experiment.log(1)
model = torch.nn.DataParallel(torch.nn.Linear(8, 8)).to(0)
model.module.load_state_dict(torch.hub.load_state_dict_from_url("https://nowhere/weights.pt"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


def test_a_script_finds_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["python", "train.py", "--data_path", "data.json", "--data_dir", "lines", "--output_dir", "out"]
    (tmp_path / "train.py").write_text(SCRIPT)
    captured, _ = capture_command(words, Cluster.of(gpu="H100"), samples=(4, 6))
    assert captured.stopped is None, captured.stopped
    assert captured.steps == 3
    assert [note.partition(" is ")[0] for note in captured.notes] == [
        "the file data.json", "the folder lines", "the package comet_ml", "the package neptune", "the file words.txt",
        "the file https://nowhere/words.txt", "the file https://nowhere/cora.tgz",
        "the file https://nowhere/wikitext-2/valid.txt",
    ]  # fmt: skip
    assert sorted(one.name for one in tmp_path.iterdir()) == ["train.py"]


def test_without_samples_the_line_is_named(tmp_path: Path) -> None:
    captured, _ = capture(tmp_path, "import json\njson.load(open('data.json'))\n")
    assert captured.stopped is not None
    assert captured.stopped.line == 2
    assert "FileNotFoundError" in captured.stopped.why


def test_options_and_their_values() -> None:
    words = ["--data-path", "a.json", "--flag", "--train_file=b.txt", "data.path=c.csv", "-d", "e", "f"]
    assert list(_options(words)) == [
        ("data_path", "a.json"), ("train_file", "b.txt"), ("data.path", "c.csv"), ("d", "e"),
    ]  # fmt: skip


def test_what_a_parser_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "error", argparse.ArgumentParser.error)
    held: Any = SimpleNamespace(last_words="")
    install(held)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert held.last_words == "its arguments are refused: the following arguments are required: --model"


def test_several_gpus_under_data_parallel_stop() -> None:
    with zeroplan.capture("H100") as plan:
        model = torch.nn.DataParallel(torch.nn.Linear(8, 8), device_ids=[0, 1]).cuda()
        model(torch.ones(2, 8))
    assert plan.plan.capture is not None
    assert "nn.DataParallel over 2 GPUs has no rule" in str(plan.plan.capture.stopped)
