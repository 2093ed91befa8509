"""Weights that a module reads beside its own, held to what models of transformers and peft read on a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from zeroplan.engines.deepspeed.outside_reads import never_called, outside_reads, passed_through
from zeroplan.tape.expanded import ExpandedTape, Op, TapeModule, TapeParam

pytestmark = [pytest.mark.torch, pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")]

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "head_dim": 16}
LFM2 = {
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "block_ff_dim": 32,
    "block_auto_adjust_ff_dim": False,
}
T5 = {
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 64,
    "feed_forward_proj": "gated-gelu",
}

#: id: (model_type, its config, whether with adapters)
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "adapters": ("llama", {**SMALL, "num_hidden_layers": 1}, True),
    "adapters of experts": ("qwen3_moe", {**SMALL, **MOE}, True),
    "short convolution": ("lfm2", {**SMALL, **LFM2}, False),
    "T5": ("t5", T5, False),
}


@pytest.mark.parametrize("case", MODELS)
def test_reads_are_those_of_the_model(case: str) -> None:
    model = _model(*MODELS[case])
    tape, read = _run(model)
    modules, params = tape.modules, tape.params
    found = {(modules[reader].name, params[p].name) for reader, own in outside_reads(modules).values() for p in own}
    found |= {(modules[reader].name, params[p].name) for reader, own in never_called(tape).items() for p in own}
    assert found == read


def test_peft_passes_through_its_own_wrapper() -> None:
    """A task's class calls the wrapper, which calls the model; the class for no task calls the model."""
    pytest.importorskip("peft")
    for task, called in (("CAUSAL_LM", True), (None, False)):
        tape, _ = _run(_model(*MODELS["adapters"], task=task))
        wrapper = next(m for m, module in enumerate(tape.modules) if module.name == "base_model")
        assert ((int(Op.ENTER), wrapper) in zip(tape.op, tape.arg, strict=True)) is called
        assert passed_through(tape) == ({} if called else {0: wrapper})


def _model(kind: str, config: dict[str, Any], adapters: bool, *, task: str | None = "CAUSAL_LM") -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    made = AutoConfig.for_model(kind, **config)
    if made.is_encoder_decoder:
        made.decoder_start_token_id = made.pad_token_id = 0
    auto = AutoModelForSeq2SeqLM if made.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(made)
    if not adapters:
        return model
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type=task))


def _run(model: Any) -> tuple[ExpandedTape, set[tuple[str, str]]]:
    """Run a forward and a backward; what is entered and gets a gradient, and who reads what that is not gathered then."""
    import torch

    named = dict(model.named_modules())
    names = {param: name for name, param in model.named_parameters()}
    index = {param: p for p, param in enumerate(names)}
    places = {module: m for m, module in enumerate(named.values())}
    modules = []
    for name, module in named.items():
        parent = places[named[name.rpartition(".")[0]]] if name else -1
        own = tuple(index[param] for param in module.parameters(recurse=False))
        modules.append(TapeModule(name, type(module).__name__, parent, own))
    owners: dict[Any, list[Any]] = {}
    for module in named.values():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, []).append(module)
    running: list[Any] = []
    read: set[tuple[str, str]] = set()
    entered: list[int] = []

    class Watched(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            param = super().__getitem__(key)
            if running and param in names and not any(owner in running for owner in owners[param]):
                read.add((modules[places[running[-1]]].name, names[param]))
            return param

    for module in named.values():
        module.register_forward_pre_hook(lambda module, _: (running.append(module), entered.append(places[module]), None)[2])
        module.register_forward_hook(lambda *_: (running.pop(), None)[1])
        module._parameters = Watched(module._parameters)
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    graded = [index[param] for param in names if param.grad is not None]
    params = tuple(TapeParam(name, tuple(param.shape), param.requires_grad, 4) for param, name in names.items())
    tape = ExpandedTape(tuple(modules), params)
    events = [(int(Op.ENTER), m, 0, 0, -1) for m in entered] + [(int(Op.GRAD), p, 0, 0, -1) for p in graded]
    return tape.with_events(events), read
