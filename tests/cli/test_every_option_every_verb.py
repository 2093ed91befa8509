"""Every option of a run is honoured by every verb, by Python and by the page, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import zeroplan
from zeroplan.core.errors import BadInput
from zeroplan.run.ask import OPTIONS, Ask
from zeroplan.ui.asked import read_question

Cli = Callable[..., tuple[int, str, str]]
MODEL = "openai-community/gpt2"
#: A value of each option that is not its default, where the kind of the option does not give one.
VALUES: dict[str, Any] = {
    "model": "EleutherAI/pythia-70m",
    "task": "sft",
    "dtype": "fp16",
    "reduce_dtype": "fp32",
    "base_dtype": "fp32",
    "optimizer": "lion",
    "transformers_version": "4.57.0",
    "checkpoint_policy": "selective",
    "attn": "eager",
    "lora_targets": ("q_proj", "v_proj"),
    "modules_to_save": ("embed_tokens",),
    "freeze": ("embed_tokens",),
    "quantize": "nf4",
    "fp8": "rowwise",
    "compile": "blocks",
    "labelled_share": 0.5,
    "lengths": "300,1024",
    "save": "full",
    "save_by": "trainer",
    "ema": "gpu",
    "gpu": "A100-80G",
    "vram": "24G",
    "cpu_ram": "256G",
    "nvme": "2T",
    "host": "server",
    "network": "4x100G",
    "schedule": "gpipe",
    "partition": "uniform",
    "engine": "zeroplan",
    "deepspeed_version": "0.14.2",
    "offload_optimizer": "cpu",
    "offload_param": "cpu",
    "ds_config": "ds.json",
    "files": ("ds.json",),
    "program": "trl",
    "depth": "formula",
    "alloc_conf": "expandable_segments:True",
    "token": "hf_x",
    "zero_init": False,
    "set_to_none": False,
}
SINKS = {
    "estimate": ("zeroplan.planner.estimate.estimate_runs",),
    "explain": ("zeroplan.planner.explain.explain",),
    "check": ("zeroplan.planner.estimate.estimate_report",),
    "recommend": ("zeroplan.search.api.run_search", "zeroplan.search.layouts.search_layouts"),
    "scale": ("zeroplan.search.scaling.run_scaling",),
    "verify": ("zeroplan.validate.api.verify",),
    "tune": ("zeroplan.tuning.api.tune",),
}
#: What a verb's command needs beside the option.
BESIDE = {"check": ("ds.json", MODEL), "recommend": (MODEL, "--gpu", "H100")}
#: Options that a verb has in a form of its own.
OF_ITS_OWN = {("scale", "gpus"), ("recommend", "files"), ("recommend", "program"), ("check", "files")}
FLAGS = [name for name, option in OPTIONS.items() if option.help]


def value_of(name: str) -> Any:
    if name in VALUES:
        return VALUES[name]
    option = OPTIONS[name]
    return not option.default if option.kind is bool else 2


class Heard(dict[str, Any]):
    """What reaches the function that a verb calls."""

    def __call__(self, *given: Any, **named: Any) -> None:
        for one in given:
            if isinstance(one, Ask):
                self.update(one.values)
            elif is_dataclass(one):
                self.update({each.name: getattr(one, each.name) for each in fields(one) if getattr(one, each.name) is not None})
            elif isinstance(one, str):
                self["model"] = one
        self.update({name: value for name, value in named.items() if value is not None})
        raise SystemExit(9)


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Heard]:
    monkeypatch.chdir(tmp_path)
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(config))

    def listen(verb: str) -> Heard:
        found = Heard()
        for path in SINKS[verb]:
            monkeypatch.setattr(path, found)
        return found

    return listen


@pytest.mark.parametrize("verb", SINKS)
def test_a_flag_reaches_the_verb_or_is_no_option_of_it(verb: str, heard: Callable[[str], Heard], cli: Cli) -> None:
    found = heard(verb)
    for name in FLAGS:
        if (verb, name) in OF_ITS_OWN:
            continue
        value, option = value_of(name), OPTIONS[name]
        beside = [word for word in BESIDE.get(verb, (MODEL,)) if name not in ("model", "params") or word != MODEL]
        found.clear()
        code, _, fault = cli(verb, *beside, *option.words(value))
        if option.taken_by(verb):
            if name == "files":  # read before the verb's own function, or by it
                assert code in (0, 1, 9), fault
                continue
            assert (code, fault) == (9, ""), (name, fault)
            assert found[name] == value, name
        elif name == "model":
            assert code in (2, 9)
        else:
            assert (code, fault.count("\n")) == (2, 1), (name, fault)
            assert option.words(value)[0] in fault, (name, fault)


@pytest.mark.parametrize("verb", ["estimate", "recommend", "scale", "verify", "tune"])
def test_an_argument_of_python_reaches_the_function_or_is_none_of_it(verb: str, heard: Callable[[str], Heard]) -> None:
    call = getattr(zeroplan, verb)
    for name in FLAGS:
        if name == "model" or (verb, name) in OF_ITS_OWN:
            continue
        if OPTIONS[name].taken_by(verb) or (verb, name) == ("recommend", "program"):
            continue  # tests/planner/test_options.py holds that it is an argument
        with pytest.raises(TypeError, match="takes no argument"):
            call(MODEL, **{name: value_of(name)})


def test_a_question_of_the_page_holds_an_option_or_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate(FLAGS):
        value = value_of(name)
        folder = tmp_path / str(number)
        folder.mkdir()
        question = {"model": MODEL, name: value} if name != "params" else {"params": "7B"}
        if not OPTIONS[name].page:
            if name == "files":
                continue
            with pytest.raises(BadInput, match="there is no field"):
                read_question(question, str(folder))
            continue
        asked = read_question(question, str(folder))
        assert asked.request.values[name] == (7_000_000_000 if name == "params" else value), name
        assert name == "model" or OPTIONS[name].words(value)[0] in asked.words
