"""The page's scripts that need no page, run by node: what a link holds, the words for flags, the machines of a map."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

STATIC = files("zeroplan.ui") / "static"


def _run(module: str, code: str) -> Any:
    """Return what a function body gives, in which `it` is one of the page's modules."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    script = f"const it = await import({json.dumps(str(STATIC / module))}); console.log(JSON.stringify((() => {{ {code} }})()))"
    done = subprocess.run([node, "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_messages_name_the_pages_controls() -> None:
    labels = """const labels = new Map(Object.entries({
        micro_batch: { words: 'Micro batch' }, gpu: { words: 'GPU' }, lora_rank: { words: 'LoRA adapters', value: '16' },
        gradient_checkpointing: { words: 'Gradient checkpointing', value: '' },
        alloc_conf: { words: 'Expandable segments', value: 'expandable_segments:True' },
    }));"""
    said = {
        "--micro-batch: -5 is out of range": "“Micro batch”: -5 is out of range",
        "add --gpu H100 or give --lora-rank 16.": "add “GPU” H100 or give “LoRA adapters”.",
        "use --lora-rank 8, --no-gradient-checkpointing": "use “LoRA adapters” 8, “Gradient checkpointing” off",
        "(--alloc-conf expandable_segments:True)": "(“Expandable segments”)",
        "use --depth formula": "use the command line's “depth” formula",
        "no flag -- here": "no flag -- here",
    }
    found = _run("labels.js", f"{labels} return {json.dumps(list(said))}.map((text) => it.named(text, labels));")
    assert found == list(said.values())


def test_a_link_holds_every_held_plan() -> None:
    code = """
        const state = { model: 'gpt2', gpus: 2, show: { stage: 7, offload_optimizer: 'x', offload_param: 'y' } };
        const held = [1, 2, 3, 4].map((gpus) => ({ model: 'a&b', gpus }));
        return it.fromHash(it.toHash(state, held).hash);
    """
    found = _run("state.js", code)
    assert found["state"] == {
        "model": "gpt2", "gpus": 2, "show": {"stage": 7, "offload_optimizer": "x", "offload_param": "y"}
    }  # fmt: skip
    assert found["held"] == [{"model": "a&b", "gpus": gpus} for gpus in (1, 2, 3)]


def test_rows_of_the_map_are_machines() -> None:
    found = _run("map.js", "return [1, 8, 16, 12].map((ranks) => it.machine(ranks, 8));")
    assert found == [{"gpus": 1, "nodes": 1}, {"gpus": 8, "nodes": 1}, {"gpus": 8, "nodes": 2}, None]
