"""``recommend --from`` a file whose ranks share the model: the search is of another layout, and says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Cli = Callable[..., tuple[int, str, str]]
NAME = "meta-llama/Llama-3.1-8B"


def test_a_file_with_degrees_is_not_searched_without_a_word(cli: Cli, tmp_path: Path) -> None:
    """torchtitan's own degrees and its selective checkpoints, which no search has (that was refused as a flag)."""
    file = tmp_path / "train.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 2048\nlocal_batch_size = 1\n'
        "[parallelism]\ntensor_parallel_degree = 4\ndata_parallel_shard_degree = -1\n"
    )
    asked = ("recommend", NAME, "--gpu", "8xH100", "--from", str(file), "--depth", "formula", "--json")
    code, said, fault = cli(*asked)
    assert (code in (0, 1), fault) == (True, "")
    answer = json.loads(said)
    notes = " ".join(answer["warnings"])
    assert "tensor_parallel_degree: the search is of data parallelism alone, and what is in use is not compared" in notes
    assert "zeroplan recommend MODEL --tp 4 --sp searches layouts that keep to it" in notes
    assert "its batch of 2 is no multiple of 8 data-parallel ranks" in notes
    assert "selective_ac_option: what is recomputed is not searched" in notes
    assert answer["current"] is None
    assert not any("degree" in one["key"] for plan in answer["ranking"] for one in plan["plan"]["unmodelled"])


def test_a_ds_config_with_degrees_is_not_searched_without_a_word(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    file.write_text(json.dumps(config | {"tensor_parallel": {"autotp_size": 4}}))
    asked = ("recommend", NAME, "--gpu", "8xH100", "--from", str(file), "--depth", "formula", "--json")
    answer = json.loads(cli(*asked)[1])
    assert any(text.startswith("tensor_parallel: the search is of data parallelism alone") for text in answer["warnings"])
    assert answer["current"] is None
    file.write_text(json.dumps(config))
    answer = json.loads(cli(*asked)[1])
    assert answer["current"] is not None
    assert not any("data parallelism alone" in text for text in answer["warnings"])
