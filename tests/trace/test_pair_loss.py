"""The loss over pairs: which tensors of the vocabulary's width it makes, by hand and beside TRL's own trainers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zeroplan.core.preferences import PairLoss
from zeroplan.tape.expanded import Kind, Op
from zeroplan.tape.options import Arithmetic, TracedPairs, TraceOptions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PAIRS, SEQ, WORDS, WIDTH = 2, 24, 512, 8
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}


def test_logits_are_kept_cast_copied_and_answered_with_gradients_of_their_size() -> None:
    """Autocast over an fp32 model: 8 samples of 256 tokens are 4 pairs."""
    pytest.importorskip("transformers")
    from zeroplan.trace.api import trace_model

    options = TraceOptions(arithmetic=Arithmetic.AUTOCAST, pairs=TracedPairs(PairLoss.RANKING_AND_NLL, wide_logits=True))
    tape = trace_model(LLAMA, "AutoModelForCausalLM", options).expand(4, 256, None)
    whole, picked, chosen = 8 * 256 * 32_000, 8 * 255 * 32_000, 4 * 255 * 32_000
    made = [size for op, size in zip(tape.op, tape.aux, strict=True) if op == Op.ALLOC and size >= chosen]
    forward = [2 * whole, 4 * whole, 4 * chosen, 4 * chosen]  # bf16, fp32, the chosen samples', their log-softmax
    # The kernel's gradient of all; the slice's; the cross entropy's of the chosen samples, twice, within those of all.
    backward = [4 * picked, 4 * whole, 4 * chosen, 4 * chosen, 4 * (whole // 2), 4 * whole]
    assert made[: len(forward)] == forward
    assert made[len(forward) : len(forward) + len(backward)] == backward
    logits = [
        size for op, size, kind in zip(tape.op, tape.aux, tape.kind, strict=True) if (op, kind) == (Op.ALLOC, Kind.LOGITS)
    ]
    assert 2 * whole in logits


def test_a_softmax_of_all_logits_is_kept_for_the_backward() -> None:
    """As LLaMA-Factory computes it: logits in 16 bits and fp32, a copy without the last token's, and the log-softmax."""
    pytest.importorskip("transformers")
    from zeroplan.trace.api import trace_model

    tape = trace_model(LLAMA, "AutoModelForCausalLM", TraceOptions(pairs=TracedPairs(PairLoss.SOFTMAX))).expand(2, 256, None)
    whole, picked = 4 * 256 * 32_000, 4 * 255 * 32_000
    made = {arg: size for op, arg, size in zip(tape.op, tape.arg, tape.aux, strict=True) if op == Op.ALLOC and size >= picked}
    gone = [arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.FREE and arg in made]
    logits, fp32, softmax, copy, *_ = made  # a structured kernel's output is made before its implementation copies
    assert [made[one] for one in (logits, fp32, softmax, copy)] == [2 * whole, 4 * whole, 4 * picked, 4 * picked]
    assert gone.index(copy) < gone.index(softmax)
    # The gather's gradient, the softmax's, the slice's, and the one of the 16-bit logits.
    assert list(made.values())[4:8] == [4 * picked, 4 * picked, 4 * whole, 2 * whole]


@pytest.mark.parametrize("loss", [PairLoss.RANKING, PairLoss.RANKING_AND_NLL])
def test_tensors_are_those_of_trls_trainers(loss: PairLoss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own functions over a model of one layer. The Triton kernel, which runs on GPUs alone, is replaced by its rule."""
    pytest.importorskip("trl")
    from trl.experimental.cpo import cpo_trainer
    from trl.experimental.orpo import orpo_trainer

    from tests.trace.storages import Storages
    from zeroplan.trace import pair_loss

    module: Any = orpo_trainer if loss is PairLoss.RANKING_AND_NLL else cpo_trainer
    kind: Any = module.ORPOTrainer if loss is PairLoss.RANKING_AND_NLL else module.CPOTrainer
    monkeypatch.setattr(module, "selective_log_softmax", pair_loss._PickedLogProbabilities.apply)
    monkeypatch.setattr(module, "is_torch_xla_available", lambda: False, raising=False)
    trainer = kind.__new__(kind)
    settings: dict[str, Any] = {"beta": 0.1, "padding_value": 0, "pad_token_id": 0, "alpha": 0.0, "cpo_alpha": 0.0}
    settings |= {"loss_type": "simpo", "simpo_gamma": 0.5, "label_smoothing": 0.0}
    settings |= {"is_encoder_decoder": False, "aux_loss_enabled": False}
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda value: value)
    for name, value in {**settings, "accelerator": accelerator}.items():
        setattr(trainer, name, value)
    head = torch.nn.Linear(WIDTH, WORDS, bias=False)
    embedding = torch.nn.Embedding(WORDS, WIDTH)

    class Model(torch.nn.Module):
        def forward(self, input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
            return SimpleNamespace(logits=head(embedding(input_ids)))

    batch = {name: torch.ones((PAIRS, SEQ), dtype=torch.int64) for name in pair_loss.pairs_of(1, 1)}

    def wide_events(run: Any) -> list[int]:
        with Storages() as storages:
            for tensor in (*head.parameters(), *embedding.parameters(), *batch.values()):
                storages.follow(tensor, made=False)
            run().backward()
            head.zero_grad(), embedding.zero_grad()
        return [size for size in storages.events if abs(size) > 4 * PAIRS * SEQ * WORDS // 2]

    mine = wide_events(lambda: pair_loss.loss_of_pairs(Model(), batch, loss, wide=False))
    theirs = wide_events(lambda: trainer.get_batch_loss_metrics(Model(), batch)[0])
    assert mine == theirs
    assert 4 * 2 * PAIRS * SEQ * WORDS in mine
