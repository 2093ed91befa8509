"""MLPs in tiles: the tape has the blocks that eager torch makes, in its order."""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.tape.expanded import Mark, Op
from zeroplan.tape.options import Arithmetic, TracedTiles, TraceOptions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def recorded(tape: Any, least: int) -> list[int]:
    found, running, alive = [], False, {}
    for op, arg, aux, _, _ in tape.events():
        running = running or (op == Op.MARK and arg == Mark.FORWARD_BEGIN)
        if op == Op.ALLOC and running and aux >= least:
            alive[arg] = aux
            found.append(aux)
        elif op == Op.FREE and arg in alive:
            found.append(-alive[arg])
    return found


@pytest.mark.parametrize(("batch", "tokens", "tiles"), [(1, 512, 4), (2, 500, 3), (2, 384, 1)])
def test_the_tape_has_what_eager_torch_allocates(batch: int, tokens: int, tiles: int) -> None:
    from tests.trace.eager_memory import LEAST, GatedMlp, blocks_of, follow_gradients, lasting
    from zeroplan.trace.api import trace_module
    from zeroplan.trace.tiled import tile_mlps

    class Model(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mlp = torch.nn.Linear(256, 256, bias=False), GatedMlp()

        def forward(self, x: Any) -> Any:
            return self.mlp(self.first(x)).sum()

    def made() -> Any:
        model = Model()
        tile_mlps(model, tiles)
        return model

    eager, data = made(), torch.randn(batch, tokens, 256)
    follow_gradients(eager)
    expected = blocks_of(lambda: eager(data).backward())

    def inputs() -> dict[str, Any]:
        return {"x": torch.empty(batch, tokens, 256, device="meta")}

    tape = trace_module(made(), inputs, TraceOptions(arithmetic=Arithmetic.FP32)).expand(batch, tokens, None)
    assert lasting(recorded(tape, LEAST)) == expected
    assert sum(op == Op.GRAD for op in tape.op) == 4  # once each, with the last tile


def test_tiles_need_gated_mlps() -> None:
    from zeroplan.trace.tiled import tile_mlps

    with pytest.raises(BadInput, match="no gated MLPs"):
        tile_mlps(torch.nn.Linear(2, 2), 2)


@pytest.mark.parametrize("tiles", [17, 40])
def test_many_tiles_peak_as_if_all_were_traced(monkeypatch: pytest.MonkeyPatch, tiles: int) -> None:
    from zeroplan.trace import tiled
    from zeroplan.trace.api import trace_at
    from zeroplan.trace.fit import TracePoint

    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "tie_word_embeddings": False,
    }
    options = TraceOptions(tiles=TracedTiles(tiles, tiles))

    def traced() -> Any:
        return trace_at(config, "AutoModelForCausalLM", options, TracePoint(1, 100)).expand(1, 100)

    short = traced()
    monkeypatch.setattr(tiled, "MOST_TRACED", 1000)
    whole = traced()
    assert len(short) < len(whole)
    assert short.activation_peak == whole.activation_peak


@pytest.mark.parametrize(("flag", "said"), [("tiled_loss", "100,000,000 tiles of 512 tokens"), ("tiled_mlp", "of 256 tokens")])
def test_more_tiles_than_tokens_are_refused(flag: str, said: str) -> None:
    from zeroplan.planner.estimate import estimate_report
    from zeroplan.run.ask import Ask

    asked = {flag: 100_000_000, "engine": "deepspeed", "stage": 2, "micro_batch": 2, "seq_len": 256, "depth": "formula"}
    with pytest.raises(BadInput, match=said):
        estimate_report(Ask(model="meta-llama/Llama-3.1-8B", gpus=8, **asked))  # type: ignore[arg-type]
