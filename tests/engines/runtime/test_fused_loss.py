"""The runtime's loss laid over tapes: what of transformers' loss is never made, and that nothing else changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from zeroplan.core.losses import leaves_loss_to_function
from zeroplan.engines.runtime.simulation import with_fused_loss
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import expanded_tape_of
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op


def tape(model: str, **options: object) -> ExpandedTape:
    resolved = resolve(Ask(model=model, engine="zeroplan", stage=2, seq_len=512, depth="simulated", **options))  # type: ignore[arg-type]
    return expanded_tape_of(resolved.engine, resolved.cases[0])


def alive(tape: ExpandedTape) -> Iterator[tuple[int, int]]:
    """(event, bytes alive), checking that nothing is freed twice or before it lives."""
    sizes: dict[int, int] = {}
    total = 0
    for i, (op, arg, aux) in enumerate(zip(tape.op, tape.arg, tape.aux, strict=True)):
        if op == Op.ALLOC:
            assert arg not in sizes
            sizes[arg] = aux
            total += aux
        elif op == Op.FREE:
            total -= sizes.pop(arg)
        elif op == Op.GRAD:
            total -= sizes.pop(aux)
        yield i, total
    assert total == sum(sizes.values())


def peak_around_loss(tape: ExpandedTape) -> int:
    """The most that lives from the backward's begin until the head's."""
    events = list(zip(tape.op, tape.arg, strict=True))
    (head,) = {m for op, kind, m in zip(tape.op, tape.kind, tape.module, strict=True) if (op, kind) == (Op.ALLOC, Kind.LOGITS)}
    begin, end = events.index((Op.MARK, Mark.BACKWARD_BEGIN)), events.index((Op.BWD_ENTER, head))
    return max(total for i, total in alive(tape) if begin < i < end)


@pytest.mark.parametrize(
    ("model", "options", "vocab", "itemsize"),
    [
        ("meta-llama/Llama-3.2-1B", {}, 128256, 2),
        ("meta-llama/Llama-3.2-1B", {"micro_batch": 3, "lora_rank": 8}, 128256, 2),
        ("meta-llama/Llama-3.2-1B", {"dtype": "fp32"}, 128256, 4),
        ("openai-community/gpt2", {"gradient_checkpointing": True}, 50257, 2),
        ("google/gemma-2-2b", {}, 256000, 2),
    ],
)
def test_two_wide_logits_less(model: str, options: dict[str, object], vocab: int, itemsize: int) -> None:
    """transformers has log-softmax's output and two gradients in fp32 alive at once; here logits and their gradient are."""
    before = tape(model, **options)
    rows = 512 * int(str(options.get("micro_batch", 1)))
    after = with_fused_loss(before, rows=rows, itemsize=itemsize)
    theirs, ours = 3 * 4 * rows * vocab, 2 * itemsize * rows * vocab
    sums = 4 * rows
    if itemsize == 4:  # their cast made no copy: log-softmax's output, and its gradient beside the loss's
        ours = 2 * 4 * rows * vocab
    assert peak_around_loss(before) - peak_around_loss(after) == pytest.approx(theirs - ours - sums, abs=2 * sums + 64)
    assert [total for _, total in alive(after)][-1] == [total for _, total in alive(before)][-1]
    assert [aux for op, aux in zip(after.op, after.aux, strict=True) if op == Op.GRAD] == [
        aux for op, aux in zip(before.op, before.aux, strict=True) if op == Op.GRAD
    ]


@pytest.mark.parametrize("model", ["google-t5/t5-small", "google-bert/bert-base-uncased"])
def test_other_losses_stay(model: str) -> None:
    before = tape(model)
    assert with_fused_loss(before, rows=512, itemsize=2) is before


def test_names() -> None:
    assert leaves_loss_to_function("LlamaForCausalLM")
    assert leaves_loss_to_function("GPT2LMHeadModel")
    assert not leaves_loss_to_function("BartForCausalLM")
    assert not leaves_loss_to_function("T5ForConditionalGeneration")


def test_names_are_those_of_the_installed_transformers() -> None:
    """Every causal language model that is said to leave its loss to ``self.loss_function`` calls it, and no other."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("needs transformers")
    wrong, seen = [], 0
    for path in (Path(spec.origin).parent / "models").glob("*/modeling_*.py"):
        for source in re.split(r"^class (?=\w)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            name = re.match(r"\w+", source)
            assert name is not None
            if name[0].endswith(("ForCausalLM", "LMHeadModel")) and "labels" in source:
                seen += 1
                if ("self.loss_function(" in source) is not leaves_loss_to_function(name[0]):
                    wrong.append(name[0])
    assert seen > 100
    assert not wrong, wrong
