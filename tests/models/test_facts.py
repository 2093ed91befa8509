"""Figures read off a ModelSpec, and what a cold look-up costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.patience import PATIENCE
from zeroplan.models import catalog
from zeroplan.models.facts import SpecFacts, largest_module_params, max_seq_len, spec_facts
from zeroplan.models.load import bare_params, load_model


def test_llama_facts() -> None:
    assert spec_facts(load_model("meta-llama/Llama-3.1-8B")) == SpecFacts(
        hidden_size=4096,
        layers=32,
        vocab_size=128256,
        heads=32,
        kv_heads=8,
        head_dim=128,
    )


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("gpt2", 1024),
        ("facebook/opt-1.3b", 2048),
        ("roberta-large", 512),
        ("bert-base-uncased", 512),
        ("bigscience/bloom-560m", 2048),
        ("t5-small", 512),
        ("openai/whisper-small", 448),
        ("google/vit-base-patch16-224", 197),
        ("google/gemma-3-4b-it", 131072),
        ("Qwen/Qwen2.5-0.5B", 32768),
        ("mingpt-1.7B", 128),
    ],
)
def test_longest_sequence(name: str, longest: int) -> None:
    assert max_seq_len(load_model(name)) == longest


@pytest.mark.parametrize(("name", "kv_heads"), [("tiiuae/falcon-7b", 1), ("tiiuae/falcon-40b", 8), ("tiiuae/falcon-rw-1b", 32)])
def test_falcons_key_value_heads(name: str, kv_heads: int) -> None:
    assert spec_facts(load_model(name)).kv_heads == kv_heads


def test_every_catalog_model_has_its_figures() -> None:
    for entry in catalog.entries():
        facts = spec_facts(load_model(entry.id))
        assert facts.hidden_size, entry.id
        assert facts.layers, entry.id
        assert facts.heads, entry.id
        assert max_seq_len(load_model(entry.id)), entry.id


def test_largest_module() -> None:
    """The embedding of Llama 3.2 1B, and the fused experts of Mixtral, which are one module."""
    assert largest_module_params(load_model("meta-llama/Llama-3.2-1B")) == 128256 * 2048
    assert largest_module_params(load_model("mistralai/Mixtral-8x7B-v0.1")) == 8 * 3 * 4096 * 14336
    assert largest_module_params(bare_params(100, largest_layer=7)) == 7
    assert largest_module_params(bare_params(100)) is None


_COLD = """
import sys
import dataclasses, json, difflib, re, enum, typing  # what any command has loaded already
from zeroplan.models.load import load_model
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
load_model(sys.argv[1])
sys.setprofile(None)
heavy = {"torch", "numpy", "transformers"}.intersection(name.split(".")[0] for name in sys.modules)
print(calls, bool(heavy))
"""


def _cold_calls(name: str) -> int:
    """Return how many Python functions the first look-up in a fresh process calls."""
    command = [sys.executable, "-c", _COLD, name]
    calls, heavy = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout.split()
    assert heavy == "False"
    return int(calls)


def test_a_cold_look_up_does_not_depend_on_depth() -> None:
    """126 layers cost what 16 do; a look-up that made each layer would call eight times as much."""
    smallest, largest = _cold_calls("meta-llama/Llama-3.2-1B"), _cold_calls("meta-llama/Llama-3.1-405B")
    assert largest < 1.2 * smallest


def test_the_catalog_is_small() -> None:
    assert len(json.dumps(catalog.catalog_table())) < 200_000
