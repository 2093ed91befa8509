"""Keyword arguments of the Python API: the fields of a request, typed, and the right name for a wrong one."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

import zeroplan
from zeroplan.planner.options import OTHER_NAMES, EstimateOptions, StageOptions, VerifyOptions
from zeroplan.planner.request import Request
from zeroplan.search.search_options import RecommendOptions, SearchOptions

#: What files fill in a request, and no user.
_OF_FILES = {
    *("precision", "optimizer_kind", "unmodelled", "chunked_head", "lora_dropout", "detached_loss"),
    *(
        "whole_embedding_states",
        "accelerate_units",
        "one_unit",
        "whole_base",
        "generation",
        "moved",
        "pads",
        "pairs",
        "reference",
        "kl_batch",
        "pair_loss",
        "built",
        "colocated",
        "longest_first",
        "mixed_units",
        "ones",
        "quantized_by",
        "reentrant",
        "rollout",
        "told_by_file",
        "torch_adam",
    ),
}
#: Degrees of parallelism that a search does not take: its engine has none.
_DEGREES = {"ulysses", "partition"}


@pytest.mark.parametrize(
    "options, homes, without",
    [
        (EstimateOptions, [Request], {"model", *_OF_FILES}),
        (StageOptions, [Request], {"model", "inputs", "stage", "ds_config", "files", "program", *_OF_FILES}),
        (
            RecommendOptions,
            [Request, SearchOptions],
            {
                "model",
                "inputs",
                "ds_config",
                "files",
                "checkpoint_policy",
                "set_to_none",
                "fp8",
                "reduce_dtype",
                "tiled_mlp",
                "tiled_loss",
                "offload_checkpoints",
                "zero_init",
                "training",
                *_DEGREES,
                *_OF_FILES,
            },
        ),
    ],
)
def test_arguments_are_the_fields_of_what_they_fill(options: type, homes: list[type], without: set[str]) -> None:
    fields = {name: hint for home in homes for name, hint in get_type_hints(home).items()}
    assert get_type_hints(options) == {name: hint for name, hint in fields.items() if name not in without}


def test_verify_takes_fields_of_a_request() -> None:
    fields = get_type_hints(Request) | {"gpus": int | None}
    assert get_type_hints(VerifyOptions).items() <= fields.items()


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
