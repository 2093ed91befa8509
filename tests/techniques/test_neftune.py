"""NEFTune's noise, held to what transformers' own hook does to a traced model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.validate.small import CONFIG
from zeroplan.core.model_config import CAUSAL_LM
from zeroplan.core.workload import Workload
from zeroplan.interop.readers import read_setup
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.tape.options import options_for
from zeroplan.techniques.neftune import Neftune, NeftuneTechnique
from zeroplan.techniques.table import techniques_of

BATCH, SEQ = 2, 64


@dataclass(frozen=True, slots=True)
class Hooked:
    """A model whose embedding has transformers' hook."""

    key: str = "hooked"

    @contextmanager
    def running(self, model: Any) -> Iterator[None]:
        from transformers.integrations.neftune import neftune_post_forward_hook

        embedding = model.get_input_embeddings()
        embedding.neftune_noise_alpha = 5.0
        handle = embedding.register_forward_hook(neftune_post_forward_hook)
        try:
            yield
        finally:
            handle.remove()


def alive(tape: Any) -> list[int]:
    """The bytes alive behind each allocation."""
    now, found, sizes = 0, [], {}
    for op, arg, aux, _, _ in tape.events():
        if op == 0:
            sizes[arg] = aux
            now += aux
            found.append(now)
        elif op == 1:
            now -= sizes.pop(arg, 0)
    return found


@pytest.mark.torch
@pytest.mark.parametrize("again", [False, True])
def test_the_tape_is_that_of_a_model_with_the_hook(again: bool) -> None:
    from zeroplan.trace.api import trace_model

    work = Workload.of(micro_batch=BATCH, seq_len=SEQ).checkpointed(again)
    options = options_for(work)
    plain = trace_model(CONFIG, CAUSAL_LM, options).expand(BATCH, SEQ)
    hooked = trace_model(CONFIG, CAUSAL_LM, replace(options, techniques=(Hooked(),))).expand(BATCH, SEQ)
    edited = NeftuneTechnique().expanded(Neftune(5.0), plain, work)
    assert alive(edited) != alive(plain)
    size = BATCH * SEQ * CONFIG["hidden_size"] * 2
    first = next(at for at, now in enumerate(alive(plain)) if now >= size)
    assert max(alive(edited)[: first + 3]) == max(alive(hooked)[: first + 3]) >= 3 * size
    assert max(alive(edited)) == pytest.approx(max(alive(hooked)), abs=1024)  # whose magnitude is a scalar tensor


def test_a_file_asks_for_it() -> None:
    said = {"model_name_or_path": "m", "max_length": 64, "output_dir": "x", "neftune_noise_alpha": 5}
    setup = read_setup(said, program="trl")
    assert (setup.value("neftune"), setup.key("neftune")) == (5, "neftune_noise_alpha")
    assert not [one for one in setup.unmodelled if "neftune" in one.key]


def test_a_run_carries_it_and_a_scale_of_zero_is_none() -> None:
    for alpha, on in ((5.0, True), (0.0, False)):
        work = resolve(Ask(model=CONFIG, engine="ddp", neftune=alpha, seq_len=64)).workload
        assert any(isinstance(value, Neftune) for _, value in techniques_of(work)) is on
