"""``zeroplan check``: the fixtures get the answers that their README names, every key is accounted for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures" / "ds_configs"


Cli = Callable[..., tuple[int, str, str]]


def run(cli: Cli, path: Path, *words: str) -> tuple[int, str]:
    """The exit code, and the answer with each item on one line."""
    code, out, _ = cli("check", str(path), *words, *(() if "--json" in words else ("--wide",)))
    return code, out if "--json" in words else re.sub(r"\n  (?=\S)", " ", out)


def write(tmp_path: Path, config: dict[str, Any]) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


ANSWERS: dict[str, tuple[int, list[str]]] = {
    "zero3_offload_auto.json": (
        0,
        [
            "OK once the HF Trainer or Lightning fills what is open: stage 3, optimizer on cpu, parameters on cpu. DeepSpeed"
            " 0.19.8 alone refuses this file.",
            "- optimizer.params: lr, betas, eps, weight_decay; scheduler.params: warmup_min_lr, warmup_max_lr,"
            " warmup_num_steps; gradient_accumulation_steps, gradient_clipping, train_batch_size,"
            ' train_micro_batch_size_per_gpu: "auto" is rejected by DeepSpeed alone; the HF Trainer fills it',
            'fp16.enabled: "auto" is dropped by DeepSpeed alone, which takes the default false; the HF Trainer fills it',
        ],
    ),
    "lightning_onebit_stage2_offload.json": (
        2,
        [
            "DeepSpeed 0.19.8 refuses this file: 1 error.",
            "OneBitAdam is gone since DeepSpeed 0.19.7, and before that the 1-bit optimizers refused ZeRO (here stage 2)",
            'the nearest config that runs: optimizer.type "AdamW" with the same ZeRO block',
        ],
    ),
    "gpt2_zero_true.json": (
        0,
        [
            "OK, with 1 warning: DeepSpeed 0.19.8 runs this file as it is: stage 1, fp16; it builds DeepSpeedZeroOptimizer.",
            "zero_optimization: true means stage 1",
            "deprecated",
            "512 = 16 × accumulation × ranks, so accumulation × ranks = 32",
        ],
    ),
    "slides_top_level_zero.json": (
        0,
        [
            "stage 0, fp32",
            "zero: DeepSpeed ignores a top-level key of this name, so the run trains at stage 0",
            "did you mean 'zero_optimization'?",
            "zero.offload_optimizer.device; zero.offload_param.device: '[cpu|nvme]' is a placeholder, not a device",
            "Keys: unknown (1)",
        ],
    ),
}


@pytest.mark.parametrize("name", sorted(ANSWERS.keys() | {path.name for path in FIXTURES.glob("*.json")}))
def test_fixtures_get_honest_answers(name: str, cli: Cli) -> None:
    code, phrases = ANSWERS[name]
    found, text = run(cli, FIXTURES / name)
    assert found == code
    for phrase in phrases:
        assert phrase in text


def test_the_nearest_config_of_the_one_bit_fixture_does_run(tmp_path: Path, cli: Cli) -> None:
    config = json.loads((FIXTURES / "lightning_onebit_stage2_offload.json").read_text())
    config["optimizer"]["type"] = "AdamW"
    del config["optimizer"]["params"]["cuda_aware"]
    config["train_micro_batch_size_per_gpu"] = 1
    code, text = run(cli, write(tmp_path, config))
    assert code == 0
    assert "runs this file as it is: stage 2, optimizer on cpu" in text


def test_renaming_zero_in_the_slides_leaves_the_placeholders(tmp_path: Path, cli: Cli) -> None:
    config = json.loads((FIXTURES / "slides_top_level_zero.json").read_text())
    config["zero_optimization"] = config.pop("zero")
    code, text = run(cli, write(tmp_path, config))
    assert code == 2
    assert "offload_optimizer.device; zero_optimization.offload_param.device: '[cpu|nvme]' is a placeholder" in text


def test_ranks_settle_the_batch(cli: Cli) -> None:
    assert run(cli, FIXTURES / "gpt2_zero_true.json", "--gpus", "8")[0] == 0
    code, text = run(cli, FIXTURES / "gpt2_zero_true.json", "--gpus", "12")
    assert code == 2
    assert "512 does not divide by micro batch 16 × 12 ranks; use a multiple of 192" in text


def test_all_problems_are_listed_one_line_each(tmp_path: Path, cli: Cli) -> None:
    config = {
        "train_batch_size": 0,
        "fp16": {"enabled": True},
        "bf16": {"enabled": True, "nope\nnewline": 1},
        "zero_optimization": {"stage": 5, "offload_param": {"device": "gpu"}, "mics_shard_size": 2},
        "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}},
    }
    code, text = run(cli, write(tmp_path, config))
    assert code == 2
    start = text.index("DeepSpeed refuses (7)")
    lines = text[start:].split("\n\n")[0].splitlines()[1:]
    assert len(lines) == 7
    assert [line.removeprefix("- ").split(":")[0] for line in lines] == [
        "bf16.nope newline",
        "zero_optimization.stage",
        "zero_optimization.offload_param.device",
        "zero_optimization.mics_shard_size",
        "train_batch_size",
        "fp16",
        "optimizer.params.max_grad_norm",
    ]


def test_json_accounts_for_every_key(cli: Cli) -> None:
    code, out = run(cli, FIXTURES / "lightning_onebit_stage2_offload.json", "--json")
    answer = json.loads(out)
    assert code == 2
    assert (answer["runs"], answer["runs_alone"], answer["stage"], answer["wrapper"]) == (False, False, 2, None)
    assert answer["findings"][0]["id"] == "optimizer.one_bit"
    effects = {key["key"]: key["effect"] for key in answer["keys"]}
    assert len(effects) == 24
    assert effects["zero_optimization.reduce_bucket_size"] == "understood"
    assert effects["optimizer.params.lr"] == "no effect on memory"


def test_a_file_that_is_no_json(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"zero_optimization": ')
    code, out, message = cli("check", str(path))
    assert (code, out) == (2, "")
    assert "is not JSON" in message


@pytest.mark.parametrize("section", ["", "zero_optimization"])
def test_many_unknown_keys_are_a_few_and_a_count(section: str, tmp_path: Path, cli: Cli) -> None:
    many: dict[str, Any] = {f"k{i}": 0 for i in range(60_000)}
    config = {"train_batch_size": 8, section: many} if section else {"train_batch_size": 8, **many}
    code, text = run(cli, write(tmp_path, config))
    assert code == (2 if section else 0)
    assert "59,980 more unknown keys" in text
    assert "and 59,800 more" in text
    assert text.count("unknown key") == 2  # the same of 20 keys in one line, and the count
    assert len(text.splitlines()) < 100


def test_sizes_beyond_64_bits(tmp_path: Path, cli: Cli) -> None:
    """Torch counts elements in 64 bits; a threshold is only compared, so any number is one."""
    zero = {"stage": 3, "stage3_max_live_parameters": 2**70, "sub_group_size": 2**90}
    config: dict[str, Any] = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": zero}
    assert run(cli, write(tmp_path, config))[0] == 0
    zero["reduce_bucket_size"] = 2**70
    code, text = run(cli, write(tmp_path, config))
    assert code == 2
    assert "reduce_bucket_size: 1180591620717411303424 is more than 64 bits hold" in text


def test_the_runtime_reads_the_file_by_its_own_rules(tmp_path: Path, cli: Cli) -> None:
    """Keys that DeepSpeed removed are the runtime's, and one that the runtime's optimizer refuses is refused."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 3}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 10**8},
        "progressive_layer_drop": {"enabled": True},
    }
    file = write(tmp_path, config)
    assert run(cli, file)[0] == 2
    code, text = run(cli, file, "--engine", "zeroplan")
    assert (code, text.splitlines()[0]) == (0, "OK: zeroplan's runtime runs this file as it is: stage 1, bf16.")
    assert "without effect there (1) zero_optimization.reduce_bucket_size" in text
    assert "--engine zeroplan" in text
    _, out = run(cli, file, "--engine", "zeroplan", "--json")
    assert json.loads(out)["program"] == "zeroplan's runtime"
    config["zero_optimization"]["stage"] = 2
    code, text = run(cli, write(tmp_path, config), "--engine", "zeroplan")
    assert (code, text.splitlines()[0]) == (2, "zeroplan's runtime refuses this file: 1 error.")
    assert cli("check", str(file), "--engine", "fsdp2")[::2] == (
        2,
        "zeroplan: --engine: fsdp2 reads no ds_config; use --engine deepspeed or zeroplan\n",
    )
