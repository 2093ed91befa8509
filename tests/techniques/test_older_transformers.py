"""What the loss of older transformers held, against a trace of a loss written so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.techniques.test_neftune import alive
from tests.validate.small import CONFIG
from zeroplan.core.model_config import CAUSAL_LM
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.interop.readers import read_setups
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.tape.copied_logits import with_copied_logits
from zeroplan.tape.options import options_for
from zeroplan.techniques.older_transformers import CopiedLogits

BATCH, SEQ = 2, 64


@dataclass(frozen=True, slots=True)
class Older:
    """A model whose loss shifts logits and labels in copies."""

    key: str = "older"

    @contextmanager
    def running(self, model: Any) -> Iterator[None]:
        from torch.nn.functional import cross_entropy

        def loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
            wide = logits.float()
            read, said = wide[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            return cross_entropy(read.view(-1, vocab_size), said.view(-1))

        model.loss_function = loss
        yield


@pytest.mark.torch
@pytest.mark.parametrize(("dtype", "precision"), [(DType.BF16, Precision.AUTOCAST), (DType.FP32, Precision.FP32)])
def test_the_tape_is_that_of_a_loss_which_copies(dtype: DType, precision: Precision) -> None:
    from zeroplan.trace.api import trace_model

    work = Workload.of(micro_batch=BATCH, seq_len=SEQ, dtype=dtype, precision=precision)
    options = options_for(work)
    plain = trace_model(CONFIG, CAUSAL_LM, options).expand(BATCH, SEQ)
    older = trace_model(CONFIG, CAUSAL_LM, replace(options, techniques=(Older(),))).expand(BATCH, SEQ)
    edited = with_copied_logits(plain, BATCH, SEQ)
    size = BATCH * SEQ * CONFIG["vocab_size"] * 4
    found, wanted = (
        [now for before, now in pairwise(alive(tape)) if now > 2 * size and abs(now - before) > size // 50]
        for tape in (edited, older)
    )
    assert found == pytest.approx(wanted, abs=4096)  # labels, which are padded in one and copied in the other
    assert max(found) > max(alive(plain)) or dtype is DType.FP32


def test_the_versions_that_copied_are_known_by_flag_and_by_a_project_that_pins_one(tmp_path: Path) -> None:
    asked = Ask(model="meta-llama/Llama-3.2-1B", engine="ddp")
    found = {
        version: _copies(asked.replace(transformers_version=version)) for version in ("4.45.2", "4.46.0", "4.48.3", "4.49")
    }
    assert found == {"4.45.2": False, "4.46.0": True, "4.48.3": True, "4.49": False}
    assert not _copies(asked)
    assert not _copies(asked.replace(engine="zeroplan", transformers_version="4.47.0"))  # a loss of its own
    (tmp_path / "args.json").write_text(json.dumps({"model_name_or_path": "gpt2", "bf16": True}))
    for pin, said in (("4.47.1", "4.47.1"), ("5.2.0", None), ("4.30.0", None)):
        (tmp_path / "requirements.txt").write_text(f"transformers=={pin}\n")
        setup = read_setups([str(tmp_path / "args.json")], "hf-trainer")
        assert setup.ask.value("transformers_version") == said
        assert (f"transformers {pin}, which requirements.txt pins" in setup.line) == (said is not None)


def _copies(asked: Ask) -> bool:
    return resolve(asked).cases[0].workload.has(CopiedLogits)
