"""Lengths beyond what a model's config names: a table of positions ends, rotary positions do not."""

from __future__ import annotations

import pytest

import zeroplan
from tests.small_llama import small_llama
from zeroplan.core.errors import BadInput
from zeroplan.core.sizes import parse_tokens


@pytest.mark.parametrize(("text", "count"), [("4k", 4096), ("256k", 262144), ("1M", 1048576), ("8_192", 8192)])
def test_tokens_are_named_as_contexts_are(text: str, count: int) -> None:
    assert parse_tokens(text) == count


def warned(config: dict[str, object], seq_len: int) -> list[str]:
    plans = zeroplan.estimate(config, seq_len=seq_len, depth="formula", stage=0)
    return [said for said in plans.report.warnings if "beyond" in said]


def test_rotary_positions_go_on_with_a_warning() -> None:
    config = small_llama() | {"max_position_embeddings": 512}
    (said,) = warned(config, 1024)
    assert "1,024 tokens are beyond the 512 positions" in said
    assert not warned(config, 512)


def test_the_scaling_of_the_config_is_named() -> None:
    config = small_llama() | {"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert "(linear)" in warned(config, 1024)[0]


@pytest.mark.parametrize(
    "model", ["openai-community/gpt2", "google-bert/bert-base-uncased", "EleutherAI/gpt-j-6b", "facebook/opt-125m"]
)
def test_a_table_of_positions_ends(model: str) -> None:
    with pytest.raises(BadInput, match="is beyond the model's"):
        zeroplan.estimate(model, seq_len=4096, depth="formula")


def test_a_shipped_tape_has_longer_samples() -> None:
    one, other = (zeroplan.estimate("meta-llama/Llama-2-7b-hf", engine="fsdp2", gpus=8, seq_len=s)[0] for s in (4096, 8192))
    assert other.gpu.activations > 1.9 * one.gpu.activations
