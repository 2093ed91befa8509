"""``zeroplan doctor LOG`` from the command line: text, JSON, the plan beside the log, snapshots, and wrong files."""

from __future__ import annotations

import json
import os
import pickle
import re
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
    assert "Planned: ZeRO-2 does not fit: " in " ".join(out.split())
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
    assert "The log has micro batch 8, where the plan has 1" in text
    assert "999 trainable parameters, where the plan has 124,439,808" in text


#: 9.27 GiB are the fp32 logits of 4 × 4,096 tokens over 151,936 words.
LOGITS = (
    'Traceback (most recent call last):\n  File "/x/transformers/loss/loss_utils.py", line 36, in fixed_cross_entropy\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 79.11 GiB of which "
    "5.31 GiB is free. Process 1 has 73.79 GiB memory in use. Of the allocated memory 70.1 GiB is allocated by PyTorch, and "
    "2.9 GiB is reserved by PyTorch but unallocated.\n"
)
LAUNCH = (
    "deepspeed --num_gpus 8 run_clm.py --model_name_or_path Qwen/Qwen2.5-1.5B --deepspeed ds.json --block_size 4096 "
    "--per_device_train_batch_size 2 --bf16 --output_dir out\n"
)


def test_a_file_of_the_run_is_planned_and_what_the_log_has_otherwise_is_the_news(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "train.sh").write_text(LAUNCH)
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": zero}))
    log = _write(tmp_path, "  Instantaneous batch size per device = 4\n" + LOGITS)
    code, out, err = cli("doctor", log, "--from", str(tmp_path / "train.sh"))
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "Planned: ZeRO-3, optimizer on cpu" in text
    assert f"The log has micro batch 4, where {tmp_path / 'train.sh'} has 2" in text
    assert "the flag" not in text
    assert "shard more" not in text  # it has stage 3
    assert "offload the optimizer" not in text  # and the optimizer on the host


def test_a_host_that_ran_out_of_memory_stands_beside_what_the_plan_needs_of_it(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "train.sh").write_text(LAUNCH.replace("1.5B", "7B"))
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": zero}))
    log = _write(tmp_path, "step 10\nsubprocess died with exit code -9: SIGKILL\n")
    words = ("--from", str(tmp_path / "train.sh"), "--gpu", "H100", "--cpu-ram", "64G")
    text = " ".join(cli("doctor", log, *words)[1].split())
    assert "does not fit" in text
    assert "of 61.0 GiB of host memory a node" in text


def test_logits_that_did_not_fit_tell_the_length(tmp_path: Path, cli: Cli) -> None:
    log, model = _write(tmp_path, LOGITS), "Qwen/Qwen2.5-1.5B"
    found = json.loads(cli("doctor", log, model, "--micro-batch", "4", "--json")[1])
    assert found["plan"]["taken"][0].startswith("sequence 4096, ")
    assert found["plan"]["plan"] is not None
    found = json.loads(cli("doctor", log, model, "--micro-batch", "2", "--seq-len", "4096", "--json")[1])
    assert found["plan"]["differs"] == ["logits of 16,384 tokens a GPU, where the plan has 2 × 4096"]


def test_a_number_of_bytes_alone_tells_no_length(tmp_path: Path, cli: Cli) -> None:
    log = _write(tmp_path, LOGITS[LOGITS.index("torch.OutOf") :])
    found = json.loads(cli("doctor", log, "Qwen/Qwen2.5-1.5B", "--micro-batch", "4", "--json")[1])["plan"]
    assert not [text for text in (*found["taken"], *found["differs"]) if "sequence" in text or "logits" in text]


def test_where_no_knob_fits_alone_the_fewest_that_fit_together_are_named(tmp_path: Path, cli: Cli) -> None:
    log = _write(tmp_path, LOGITS[LOGITS.index("torch.OutOf") :])
    words = ("Qwen/Qwen2.5-1.5B", "--stage", "2", "--gpu", "2xRTX4090", "--micro-batch", "8", "--seq-len", "1024")
    found = json.loads(cli("doctor", log, *words, "--json")[1])["plan"]
    assert found["plan"]["fits"] is False
    assert " and " in found["relief"]["what"]
    text = " ".join(cli("doctor", log, *words)[1].split())
    assert f"Smallest change that fits: {found['relief']['what']} ({found['relief']['flags']})" in text
    assert "shard more" not in text
    changed = ("estimate", *words[:3], *found["relief"]["flags"].split(), *words[3:5], "--seq-len", "1024", "--json")
    kept = () if "--micro-batch" in changed else words[5:7]
    plan = json.loads(cli(*changed, *kept)[1])["plans"][0]
    assert (plan["fits"], plan["gpu"]["total"]) == (True, found["relief"]["total"])


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


@pytest.mark.parametrize(
    ("more", "blamed"),
    [("--stage 9", "--stage: stage 9 does not exist"), ("--gpus 8", "--gpus: is of a run that is planned, and no model")],
)
@pytest.mark.parametrize("line", ["{'train_runtime': 100.0, 'train_loss': 2.0}", "torch.OutOfMemoryError: CUDA out of memory."])
def test_options_that_nothing_reads_are_refused(line: str, more: str, blamed: str, tmp_path: Path, cli: Cli) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"{line}\n")
    code, out, err = cli("doctor", str(log), *more.split())
    assert (code, out) == (2, "")
    assert blamed in err


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
        return os.system, ("touch was-run",)


@pytest.mark.parametrize(
    "data", [pickle.dumps(_Evil()), b"\x80\x04garbage", pickle.dumps([1]), pickle.dumps({"segments": [3]})]
)
def test_a_pickle_that_is_no_snapshot_is_refused_and_not_run(
    data: bytes, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    code, _, err = cli("doctor", str(path))
    assert (code, len(err.splitlines())) == (2, 1)
    assert not Path("was-run").exists()


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


def test_a_run_is_not_told_to_shard_as_it_does(tmp_path: Path, cli: Cli) -> None:
    """A stage that was said, without a model to plan, decides which knob comes first."""
    log = _write(tmp_path, LOGITS[LOGITS.index("torch.OutOf") :])
    firsts = [re.search(r"1\. (.*)", cli("doctor", log, "--stage", str(stage))[1]) for stage in (1, 2, 3)]
    assert [found and found[1] for found in firsts] == [
        "shard more: ZeRO-2, then ZeRO-3",
        "shard more: ZeRO-3",
        "switch gradient checkpointing on",
    ]
