"""Modules trained whole beside adapters: parameters and tensors are peft's, files ask for them, and what cannot be is said."""

from __future__ import annotations

from typing import Any

import pytest

import zeroplan
from tests.validate.small import CONFIG
from zeroplan.core.errors import BadInput
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.readers import read_setup
from zeroplan.planner.estimate import estimate_runs
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import Kind, Op

BOTH = ("embed_tokens", "lm_head")


@pytest.mark.torch
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("names", [BOTH, ("embed_tokens",), ("lm_head",), ("norm",)])
def test_the_models_parameters_are_those_of_peft(tied: bool, names: tuple[str, ...]) -> None:
    """`norm` ends the names of a block's norms, too: peft copies each module whose full name ends so."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    config = {**CONFIG, "tie_word_embeddings": tied}
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **values))
        made.tie_weights()
        model = get_peft_model(made, LoraConfig(r=4, target_modules="all-linear", modules_to_save=list(names)))
    theirs = [(name.removeprefix("base_model.model."), tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    ask = Ask(model=config, engine="ddp", lora_rank=4, modules_to_save=names, seq_len=64)
    (case,) = resolve(ask).cases
    shapes = case.spec.parameters
    assert list(zip(shapes.names, shapes.shapes, shapes.trainable, strict=True)) == theirs
    assert shapes.trained_total == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.torch
def test_trls_head_in_tiles_reads_the_copy() -> None:
    def logits(**more: Any) -> int:
        asked = resolve(Ask(model=CONFIG, engine="ddp", lora_rank=4, modules_to_save=BOTH, seq_len=64, **more))
        tape = ExpandedTapes(asked.engine).of(asked.cases[0])
        return sum(op == Op.ALLOC and kind == Kind.LOGITS for op, kind in zip(tape.op, tape.kind, strict=True))

    assert logits() > 0 == logits(chunked_head=True)


def test_copies_have_gradients_and_states_of_their_size() -> None:
    def states(**more: Any) -> int:
        (plan,) = zeroplan.estimate(CONFIG, engine="ddp", lora_rank=4, seq_len=64, depth="formula", **more)
        return plan.gpu.model_states

    copied = 2 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert states(modules_to_save=BOTH) - states() == copied * 4 * 4  # the copies in fp32, their gradients and two states


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("trl", {"dataset_name": "x", "use_peft": True, "lora_modules_to_save": list(BOTH)}),
        ("llama-factory", {"stage": "sft", "finetuning_type": "lora", "additional_target": "embed_tokens,lm_head"}),
        ("axolotl", {"adapter": "lora", "lora_r": 8, "lora_modules_to_save": list(BOTH), "datasets": []}),
        ("ms-swift", {"train_type": "lora", "modules_to_save": list(BOTH), "dataset": "x"}),
    ],
)
def test_files_of_programs_ask_for_them(program: str, said: dict[str, Any]) -> None:
    key = {"axolotl": "base_model", "ms-swift": "model"}.get(program, "model_name_or_path")
    setup = read_setup({key: "m", **said}, program=program)
    assert setup.value("modules_to_save") == BOTH
    assert not [one.key for one in setup.unmodelled if "modules" in one.key or "additional" in one.key]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"lora_rank": None}, "without adapters"),
        ({"engine": "fsdp"}, "not modelled under fsdp"),
        ({"compile": "blocks"}, "compiled blocks"),
        ({"modules_to_save": ("embed_token",)}, "no module .*embed_tokens"),
        ({"modules_to_save": ("q_proj",)}, "no module"),
        ({"modules_to_save": 3}, "no list of names"),
    ],
)
def test_what_it_conflicts_with_is_said(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        resolve(Ask(**{"model": CONFIG, "engine": "ddp", "modules_to_save": BOTH, "lora_rank": 4, "seq_len": 64, **asked}))


def test_narrower_copies_beside_wide_adapters_are_said() -> None:
    def left(**more: Any) -> list[Effect]:
        (run,) = estimate_runs(Ask(model=CONFIG, engine="ddp", lora_rank=4, seq_len=64, modules_to_save=BOTH, **more)).runs
        assert run is not None
        return [one.effect for one in run.plan.unmodelled if one.key == "--modules-to-save"]

    assert left() == [Effect.LESS]
    assert left(quantize="nf4") == []  # transformers makes fp32 what it does not quantise
