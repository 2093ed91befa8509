"""Keyword arguments of the Python API: the fields of a request, typed, and the right name for a wrong one."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

import zeroplan
from zeroplan.planner.options import OTHER_NAMES, EstimateOptions, StageOptions, TuneOptions, VerifyOptions
from zeroplan.run.ask import OPTIONS
from zeroplan.search.search_options import RecommendOptions, SearchOptions
from zeroplan.techniques.table import TABLE

#: What Python alone says.
PYTHON = {"largest_layer_params", "offline", "inputs", "adapter_dtype"}


def taken(verb: str) -> dict[str, Any]:
    """The options that a verb takes, and those of Python, with their types."""
    of_techniques = {option.name for technique in TABLE for option in technique.options}  # which a type need not list
    unlisted = of_techniques - get_type_hints(EstimateOptions).keys()
    found = {name for name, option in OPTIONS.items() if option.taken_by(verb) or name in PYTHON} - unlisted
    return {name: OPTIONS[name].hint for name in found - {"model"}}


def test_arguments_of_estimate_are_its_options() -> None:
    assert get_type_hints(EstimateOptions) == taken("estimate")
    by_the_name = {"inputs", "stage", "ds_config", "files", "program"}
    assert get_type_hints(StageOptions) == {name: hint for name, hint in taken("estimate").items() if name not in by_the_name}


def test_arguments_of_a_search_are_its_options_and_those_of_the_run() -> None:
    own = {name: hint for name, hint in get_type_hints(SearchOptions).items() if name not in ("training", "other_engine")}
    found = {name: hint for name, hint in taken("recommend").items() if name != "inputs"}
    whole_training = {"tokens": int | str | None, "price": float | str | None}
    assert get_type_hints(RecommendOptions) == {**found, **own, **whole_training}


@pytest.mark.parametrize(("options", "verb"), [(VerifyOptions, "verify"), (TuneOptions, "tune")])
def test_what_is_run_here_takes_options_of_the_same_types(options: type, verb: str) -> None:
    hints = get_type_hints(options)
    assert hints.keys() == (taken(verb).keys() - PYTHON) | {"offline"}
    others = {"gpus": int | None, "gradient_checkpointing": bool | None if verb == "tune" else bool}
    assert hints == {**{name: OPTIONS[name].hint for name in hints}, **others}


def test_every_option_is_said_somewhere() -> None:
    for name, option in OPTIONS.items():
        assert option.name == name
        assert not option.page or option.help, name
        assert not option.help or any(option.taken_by(verb) for verb in ("estimate", "verify")), name


def test_other_programs_names_lead_to_arguments() -> None:
    known = EstimateOptions.__annotations__.keys()
    assert {ours for ours, _ in OTHER_NAMES.values()} <= known
    assert not OTHER_NAMES.keys() & known


@pytest.mark.parametrize(
    "call, wrong, near",
    [
        (zeroplan.estimate, "micro_bach", "did you mean 'micro_batch'"),
        (zeroplan.estimate, "batch_size", "write micro_batch"),
        (zeroplan.estimate, "colour", "it takes adapter_dtype, alloc_conf, attn,"),
        (zeroplan.estimate_zero3_mem, "stage", "takes no argument 'stage'"),
        (zeroplan.recommend, "global_bach", "did you mean 'global_batch'"),
        (zeroplan.recommend, "files", "recommend() takes no argument 'files'"),
        (zeroplan.verify, "vram", "verify() takes no argument 'vram'"),
    ],
)
def test_a_wrong_argument_is_answered_with_the_near_one(call: Any, wrong: str, near: str) -> None:
    with pytest.raises(TypeError, match="takes no argument") as caught:
        call("openai-community/gpt2", **{wrong: 1})
    assert near in str(caught.value)
