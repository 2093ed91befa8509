"""``zeroplan doctor LOG`` from the command line: text, JSON, the plan beside the log, snapshots, and wrong files."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.doctor.advised import WIDE
from tests.logs.cases import CASES
from tests.logs.real_runs import FOLDER

ROOT = Path(__file__).resolve().parents[2]
Cli = Callable[..., tuple[int, str, str]]
OOM = next(case.text for case in CASES if case.name == "oom loss")


def _write(folder: Path, text: str) -> str:
    path = folder / "train.log"
    path.write_text(text)
    return str(path)


def test_the_first_line_names_the_cause(tmp_path: Path, cli: Cli) -> None:
    code, out, _ = cli("doctor", _write(tmp_path, OOM))
    assert code == 0
    assert out.splitlines()[0].startswith("Out of GPU memory on GPU 0 in the loss:")
    assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line)  # a path is not wrapped
    assert "fused cross entropy" in out


def test_with_a_model_the_plan_stands_beside(tmp_path: Path, cli: Cli) -> None:
    log = _write(tmp_path, "  Instantaneous batch size per device = 8\n" + OOM.replace("79.15 GiB", "23.64 GiB"))
    words = ["doctor", log, "openai-community/gpt2", "--seq-len", "1024", "--stage", "0", "--json"]
    found = json.loads(cli(*words)[1])
    assert found["cause"] == "gpu_memory"
    assert found["plan"]["taken"] == ["micro batch 8", "a card of 23.6 GiB"]
    plan = found["plan"]["plan"]
    assert plan["stage"] == 0
    assert plan["gpu"]["usable"] == pytest.approx(23.64 * 2**30, rel=1e-3)


def test_the_smallest_change_that_fits(tmp_path: Path, cli: Cli) -> None:
    log = _write(tmp_path, OOM.replace("79.15 GiB", "14.00 GiB"))
    _, out, _ = cli(
        *("doctor", log, "meta-llama/Llama-3.2-1B", "--gpus", "8", "--stage", "2"),
        *("--micro-batch", "2", "--seq-len", "2048", "--offload-optimizer", "none", "--offload-param", "none"),
    )
    assert "it does not fit" in out
    assert "Smallest change that fits: " in out
    # The command that it prints goes on with the log's card.
    assert "--vram 14.59G" in out


def test_the_advice_that_was_run(tmp_path: Path, cli: Cli) -> None:
    """The change that let a run of ours end well is still the one that its log and model give."""
    case = json.loads((ROOT / "benchmarks" / "results" / "advised.json").read_text())["states"]
    (tmp_path / "model.json").write_text(json.dumps(WIDE))
    settings = case["settings"]
    words = ["--engine", settings["engine"], "--gpus", "2", "--dtype", "bf16", "--stage", str(settings["stage"])]
    words += ["--seq-len", str(settings["seq_len"]), "--offload-optimizer", "none", "--offload-param", "none"]
    log = str(FOLDER / "advised_states.log")
    out = cli("doctor", log, str(tmp_path / "model.json"), *words, "--vram", "2506.7MiB", "--json")[1]
    found = json.loads(out)
    assert (found["cause"], found["plan"]["relief"]["flags"]) == (case["cause"], case["advised"])
    assert case["fits"]


def test_a_plan_of_another_run_is_said_to_be_one(tmp_path: Path, cli: Cli) -> None:
    log = _write(tmp_path, "  Number of trainable parameters = 999\n  Instantaneous batch size per device = 8\n" + OOM)
    _, out, _ = cli("doctor", log, "openai-community/gpt2", "--micro-batch", "1", "--stage", "0")
    text = " ".join(out.split())
    assert "micro batch 8 in the log, 1 in the plan" in text
    assert "999 trainable parameters in the log, 124,439,808 in the plan" in text


SNAPSHOT = {
    "segments": [
        {
            "device": 1,
            "total_size": 10 << 20,
            "blocks": [
                {
                    "size": 8 << 20,
                    "state": "active_allocated",
                    "frames": [
                        {"filename": "/x/torch/nn/modules/module.py", "line": 1, "name": "_call_impl"},
                        {"filename": "/home/u/model.py", "line": 7, "name": "forward"},
                    ],
                },
                {"size": 2 << 20, "state": "inactive"},
            ],
        }
    ],
    "device_traces": [[], [{"action": "oom", "size": 4 << 20}]],
}


def test_a_memory_snapshot(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    _, out, _ = cli("doctor", str(path))
    assert out.splitlines()[0] == "Out of GPU memory on GPU 1: 8.00 MiB allocated of 10.00 MiB reserved, 4.00 MiB"
    assert "u/model.py:7 forward" in out
    found = json.loads(cli("doctor", str(path), "--json")[1])
    assert (found["allocated"], found["reserved"], found["oom"]) == (8 << 20, 10 << 20, [4 << 20])


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/zeroplan-was-run",)


@pytest.mark.parametrize(
    "data", [pickle.dumps(_Evil()), b"\x80\x04garbage", pickle.dumps([1]), pickle.dumps({"segments": [3]})]
)
def test_a_pickle_that_is_no_snapshot_is_refused_and_not_run(data: bytes, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    code, _, err = cli("doctor", str(path))
    assert (code, len(err.splitlines())) == (2, 1)
    assert not Path("/tmp/zeroplan-was-run").exists()


def test_wrong_files_and_flags_are_one_line(tmp_path: Path, cli: Cli) -> None:
    binary = tmp_path / "core"
    binary.write_bytes(b"\x7fELF\0\0")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    log = _write(tmp_path, OOM)
    for words in (
        [str(tmp_path / "none.log")],
        [str(tmp_path)],
        [str(fifo)],
        ["/dev/zero"],
        [str(binary)],
        [log, "--calibrate"],
        ["openai-community/gpt2", "--gpus", "2"],
        [log, "no/such-model", "--gpus", "0"],
    ):
        code, _, err = cli("doctor", *words)
        assert (code, len(err.splitlines())) == (2, 1), words
