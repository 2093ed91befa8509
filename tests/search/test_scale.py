"""``zeroplan scale``: the best configuration on more and more GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints
from xml.etree import ElementTree

import pytest

import zeroplan
from zeroplan.core.errors import BadInput
from zeroplan.run.ask import OPTIONS
from zeroplan.search.scaling import ScaleOptions, Scaling, parse_ranks
from zeroplan.search.search_options import SearchOptions

Cli = Callable[..., tuple[int, str, str]]
GPT2 = "openai-community/gpt2"
#: Large states on small cards: one GPU holds nothing, more of them a larger batch each.
ASKED: dict[str, Any] = {"vram": "4G", "seq_len": 512, "stage": 3, "offload_optimizer": "none", "gpus_per_node": 4}


@pytest.fixture(scope="module")
def found() -> Scaling:
    return zeroplan.scale(GPT2, "1..8", **ASKED)


def test_ranks_are_a_range_that_doubles_or_a_list() -> None:
    assert parse_ranks("8..1024") == (8, 16, 32, 64, 128, 256, 512, 1024)
    assert parse_ranks("3..20") == (3, 6, 12)
    assert parse_ranks("24, 8,8") == (8, 24)
    assert parse_ranks([16, 8]) == (8, 16)
    assert parse_ranks(4) == (4,)


@pytest.mark.parametrize("gpus", ["", "8..", "8..4", "0..8", "a", "1,,2", "8..99999999", [0], [True], [], list(range(1, 99))])
def test_other_ranks_are_refused(gpus: Any) -> None:
    with pytest.raises(BadInput, match="--gpus"):
        parse_ranks(gpus)


def test_each_point_is_of_its_cluster_and_states_shrink(found: Scaling) -> None:
    assert [(p.ranks, p.cluster.nodes, p.cluster.gpus) for p in found.points] == [(1, 1, 1), (2, 1, 2), (4, 1, 4), (8, 2, 4)]
    assert found.points[0].best is None
    assert found.first is found.points[1]
    states = [point.shown.plan.gpu.model_states for point in found.points]
    assert states == sorted(states, reverse=True)
    assert states[1] == pytest.approx(2 * states[2], rel=0.01)
    for point in found.points[1:]:
        best = point.shown
        assert best.fits
        assert point.rank_tokens_per_second == best.tokens_per_second / point.ranks
        assert (point.largest_micro_batch or 0) >= best.workload.batch.micro_batch


def test_a_larger_batch_makes_it_superlinear(found: Scaling) -> None:
    """Twice the GPUs are more than twice as fast, because each holds fewer states and so more samples."""
    batches = [point.shown.workload.batch.micro_batch for point in found.points[1:]]
    assert batches[0] < batches[1] <= batches[2]
    assert found.points[2] in found.superlinear
    assert found.points[1] not in found.superlinear
    rows = found.to_dict()["points"]
    assert rows[2]["speedup"] > 2
    assert rows[2]["efficiency"] == pytest.approx(rows[2]["rank_tokens_per_second"] / rows[1]["rank_tokens_per_second"])
    assert [row["fits"] for row in rows] == [False, True, True, True]
    text = str(found)
    assert text.startswith("Fits from 2 GPUs on: ZeRO-3")
    assert f"micro batch {batches[0]} becomes " in " ".join(text.split())


def test_a_row_is_what_recommend_finds(found: Scaling) -> None:
    """Or something faster that leaves less of the card free."""
    asked = {name: value for name, value in ASKED.items() if name != "gpus_per_node"}
    best = zeroplan.recommend(GPT2, gpus=4, explain=False, **asked).best
    row = found.points[2].best
    assert best is not None
    assert row is not None
    if row.plan == best.plan:
        assert row.step_seconds == best.step_seconds
    else:
        assert row.tokens_per_second > 1.03 * best.tokens_per_second


def test_pictures_are_whole(found: Scaling) -> None:
    from zeroplan.report.scaling_html import scaling_page, scaling_svg

    root = ElementTree.fromstring(scaling_svg(found))
    words = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]
    assert words.count("does not fit") == 1
    assert all(words.count(str(count)) >= 2 for count in (1, 2, 4, 8))  # below each bar of both
    assert "<h1>openai-community/gpt2</h1>" in scaling_page(found)


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    words = ("--vram", "4G", "--seq-len", "512", "--depth", "formula", "--gpus", "2,4", "--svg", str(tmp_path / "a.svg"))
    code, out, err = cli("scale", GPT2, *words, "--json")
    assert (code, err) == (1, "")  # at formula depth nothing is known to fit
    assert [point["ranks"] for point in json.loads(out)["points"]] == [2, 4]
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert cli("scale", GPT2, *words)[1].startswith("Unknown: nothing is known to fit")
    code, _, err = cli("scale", GPT2, "--gpu", "4xT4", "--gpus", "6")
    assert (code, err) == (
        2,
        "zeroplan: --gpus: 6 GPUs are not whole nodes of 4; use 8, or another --gpus-per-node\n",
    )
    code, out, err = cli("scale", GPT2, "--vram", "1G", "--cpu-ram", "1G", "--gpus", "1,2", "-q", "--depth", "formula")
    assert (code, out.partition(":")[0], err) == (1, "Nothing fits", "")


def test_arguments_are_fields_of_what_they_fill() -> None:
    fields = {name: option.hint for name, option in OPTIONS.items()} | get_type_hints(SearchOptions)
    own = get_type_hints(ScaleOptions)
    assert own.pop("gpus_per_node") == int | None
    assert (own.pop("tokens"), own.pop("price")) == (int | str | None, float | str | None)
    assert own.items() <= fields.items()
