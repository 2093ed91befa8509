"""``--samples N,LENGTH``: data, tokenizers and configs that are missing, replaced within a captured script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.capture.test_capture import capture
from zeroplan.capturing.hooks.samples import columns_of, invented_rows

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm_ranks")

SCRIPT = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2")
config = AutoConfig.from_pretrained("openai-community/gpt2", n_layer=2)
assert len(tokenizer) == config.vocab_size == 50257
model = AutoModelForCausalLM.from_config(config).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    batch = tokenizer(["the " * 32] * 4, return_tensors="pt", padding=True).to("cuda")
    assert batch["input_ids"].shape == (4, 32), batch["input_ids"].shape
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
"""


@pytest.mark.long
def test_a_tokenizer_and_a_config_that_are_missing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    captured, _ = capture(tmp_path, SCRIPT, samples=(8, 32))
    assert captured.stopped is None
    assert captured.steps == 3
    assert captured.notes == ["the tokenizer of openai-community/gpt2 is invented: 50257 words, one token each"]


def test_without_the_flag_a_line_names_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    captured, _ = capture(tmp_path, SCRIPT)
    assert captured.stopped is not None
    assert captured.stopped.line == 4
    assert "--samples 64,512" in captured.stopped.why


@pytest.mark.parametrize(
    ("name", "config", "program", "columns"),
    [
        ("nyu-mll/glue", "sst2", "", ("sentence", "label", "idx")),
        ("wikitext", "wikitext-2-raw-v1", "", ("text",)),
        ("me/pairs", None, "from trl import DPOTrainer", ("prompt", "chosen", "rejected")),
        ("me/own", None, "row['question'] + row['output'] + row['no column']", ("question", "output")),
        ("me/own", None, "no ( python", ("text", "label")),
    ],
)
def test_the_columns_are_those_that_the_program_asks_for(
    name: str, config: str | None, program: str, columns: tuple[str, ...]
) -> None:
    assert columns_of(name, config, program) == columns


def test_rows_have_the_length() -> None:
    rows = invented_rows(("messages",), 3, 10)
    assert [len(turn["content"].split()) for turn in rows["messages"][0]] == [5, 5]
    pairs = invented_rows(("prompt", "chosen", "rejected"), 2, 10)
    assert len(pairs["prompt"][0][0]["content"].split()) + len(pairs["chosen"][0][0]["content"].split()) == 10
    assert invented_rows(("label",), 3, 10)["label"] == [0, 1, 0]
    assert list(invented_rows(("translation",), 1, 4, "ro-en")["translation"][0]) == ["ro", "en"]


def test_a_data_set_that_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = """
import datasets
found = datasets.load_dataset("me/nothing")
assert found["train"].num_rows == 8
assert len(found["train"][0]["text"].split()) == 32
assert datasets.load_dataset("me/nothing", split="train[:10%]").column_names == ["text"]
"""
    captured, _ = capture(tmp_path, code, samples=(8, 32))
    assert captured.stopped is None, captured.stopped
    captured, _ = capture(tmp_path, code)
    assert captured.stopped is not None
    assert "--samples" in captured.stopped.why


@pytest.mark.parametrize("text", ["64", "64,0", "a,b", "1,2,3", ""])
def test_a_number_that_is_none_is_one_line(cli: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    code, out, err = cli("capture", "--samples", text, "--", "python", str(tmp_path / "train.py"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--samples" in err
