"""Label smoothing: its tape is that of transformers' own smoother, files ask for it, and what cannot be is said."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.techniques.test_neftune import alive
from tests.validate.small import CONFIG
from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import CAUSAL_LM, SEQ2SEQ_LM
from zeroplan.core.workload import Precision, Workload
from zeroplan.interop.readers import read_setup
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.tape.options import options_for
from zeroplan.techniques.label_smoothing import LabelSmoothing

BATCH, SEQ = 2, 64
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 500,
}


@dataclass(frozen=True, slots=True)
class Smoothed:
    """The loss as ``Trainer.compute_loss`` makes it."""

    wide: bool
    causal: bool
    key: str = "theirs"

    def loss(self, model: Any, batch: dict[str, Any]) -> Any:
        from accelerate.utils.operations import convert_to_fp32
        from transformers.trainer_pt_utils import LabelSmoother

        inputs = dict(batch)
        labels = inputs.pop("labels")
        if not self.causal:
            inputs["decoder_input_ids"] = labels
        output = convert_to_fp32(model(**inputs)) if self.wide else model(**inputs)
        return LabelSmoother(0.1)(output, labels, shift_labels=self.causal, num_items_in_batch=100)


@pytest.mark.torch
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("config", "auto"), [(CONFIG, CAUSAL_LM), (T5, SEQ2SEQ_LM)], ids=["llama", "t5"])
def test_the_tape_is_that_of_the_trainers_smoother(config: dict[str, Any], auto: str, wide: bool) -> None:
    pytest.importorskip("accelerate")
    from zeroplan.trace.api import trace_model

    plain = options_for(Workload.of(micro_batch=BATCH, seq_len=SEQ, precision=Precision.AUTOCAST))
    ours, theirs = (
        alive(trace_model(config, auto, replace(plain, techniques=(one,))).expand(BATCH, SEQ))
        for one in (LabelSmoothing(wide, 0.1), Smoothed(wide, causal=auto == CAUSAL_LM))
    )
    assert max(ours) == pytest.approx(max(theirs), abs=4096)  # numbers of single tokens come in another order
    assert max(ours) > 3 * 4 * BATCH * (SEQ - 1) * config["vocab_size"]


def test_the_trainers_file_asks_for_it_and_others_say_that_it_is_open() -> None:
    said = {"model_name_or_path": "m", "output_dir": "x", "label_smoothing_factor": 0.1}
    setup = read_setup(said, program="hf-trainer")
    assert (setup.value("label_smoothing"), setup.unmodelled) == (0.1, ())
    other = read_setup({**said, "max_length": 64}, program="trl")
    assert [one.key for one in other.unmodelled] == ["label_smoothing_factor"]
    assert read_setup({**said, "label_smoothing_factor": 0}, program="hf-trainer").value("label_smoothing") in (0, None)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"chunked_head": True}, "no logits"),
        ({"cut_cross_entropy": True}, "no logits"),
        ({"liger": True}, "no logits"),
        ({"compile": "blocks"}, "beside it"),
        ({"task": "question-answering"}, "no labels"),
        ({"engine": "zeroplan"}, "not modelled under zeroplan"),
    ],
)
def test_what_it_conflicts_with_is_said(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        resolve(Ask(**{"model": CONFIG, "engine": "ddp", "label_smoothing": 0.1, "seq_len": 64, **asked}))
