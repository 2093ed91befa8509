"""A whole training: time, failures, energy and price by hand, and what published trainings counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import sqrt
from pathlib import Path

import pytest

from zeroplan.api import recommend
from zeroplan.core.errors import BadInput
from zeroplan.search.whole_training import (
    FAILURES_PER_DAY,
    RESTART_SECONDS,
    Budget,
    WholeTraining,
    budget_of,
    read_prices,
    spare_nodes,
    whole_training,
)

Cli = Callable[..., tuple[int, str, str]]
_TOKENS = 15_600_000_000_000


def test_failures_are_those_of_llama_3() -> None:
    """BLOOM's rate foretells the 419 unexpected interruptions of 16,384 GPUs in 54 days to a sixth."""
    assert pytest.approx(419, rel=0.17) == FAILURES_PER_DAY * 54 * 16384


def test_llama_3_405b_took_more_than_nine_tenths_of_its_time() -> None:
    """At its published speed, 158 tokens a second and GPU: more than 90 % effective time (arXiv 2407.21783, section 3.3.4)."""
    found = whole_training(
        Budget(_TOKENS, {}),
        tokens_per_second=158.0 * 16384,
        ranks=16384,
        nodes=2048,
        gpu="H100",
        params=405_900_000_000,
        write_gbs=3.0,
    )
    assert found.goodput is not None
    assert 0.9 < found.goodput < 0.95
    assert found.days is not None
    assert found.days == pytest.approx(_TOKENS / (158 * 16384) / 86400 / found.goodput)
    assert found.gpu_hours == pytest.approx(found.days * 24 * 16384)


def test_by_hand() -> None:
    budget = Budget(8_640_000, {"H100": 2.0})
    found = whole_training(budget, tokens_per_second=100.0, ranks=8, nodes=1, gpu="H100", params=10**9, write_gbs=1.0)
    between, saving = 86400 / (8 * FAILURES_PER_DAY), 14.0
    assert found.save_seconds == pytest.approx(sqrt(2 * saving * between))
    lost = 2 * saving / found.save_seconds + RESTART_SECONDS / between  # at the best interval both parts are alike
    assert found.goodput == pytest.approx(1 - lost)
    assert found.days == pytest.approx(1 / (1 - lost))
    assert found.failures == pytest.approx(8 * FAILURES_PER_DAY / (1 - lost))
    assert found.megawatt_hours == pytest.approx(24 * 8 * 700 / 1e6 / (1 - lost))
    assert found.price == pytest.approx(2.0 * 24 * 8 / (1 - lost))


def test_spare_nodes_are_as_many_as_bloom_kept() -> None:
    """1.5 failures a week, for which it kept 4 nodes of 52; many more where a thousand fail."""
    assert spare_nodes(7 * 384 * FAILURES_PER_DAY) == 4
    assert spare_nodes(0.001) == 0
    assert 1000 < spare_nodes(1000.0) < 1100


def test_what_one_more_node_buys_and_a_slow_host_costs() -> None:
    def trained(nodes: int, speed: float = 100.0) -> WholeTraining:
        budget, size = Budget(8_640_000_000, {}), 10**9
        return whole_training(
            budget, tokens_per_second=speed * nodes, ranks=8 * nodes, nodes=nodes, gpu="H100", params=size, write_gbs=1.0
        )

    days = [one.days or 0.0 for one in (trained(10), trained(11), trained(10, 100 / 1.1))]
    assert trained(10).next_node_days == pytest.approx(days[0] - days[1], rel=0.01)  # failures are a little more
    assert trained(10).slow_host_days == pytest.approx(days[2] - days[0], rel=0.01)


def test_what_is_not_known_is_not_said() -> None:
    def trained(ranks: int, gpu: str) -> WholeTraining:
        budget = Budget(10**9, {"H100": 2.0})
        return whole_training(budget, tokens_per_second=1e6, ranks=ranks, nodes=1000, gpu=gpu, params=10**9, write_gbs=1.0)

    other = trained(8, "A10G")
    assert other.megawatt_hours is None
    assert other.price is None
    failing = trained(1 << 20, "H100")
    assert (failing.days, failing.goodput) == (None, None)


def test_prices_are_a_number_or_a_file(tmp_path: Path) -> None:
    assert read_prices("2.5", "H100") == {"H100": 2.5}
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"H100": 3, "A100-80G": 1.5}))
    assert read_prices(str(file), "H100") == {"H100": 3.0, "A100-80G": 1.5}
    assert budget_of("15T", 2, "8xH100") == Budget(15_000_000_000_000, {"H100": 2.0})
    assert budget_of(None, None, None) is None
    for wrong in ("free", "-1", "0"):
        with pytest.raises(BadInput, match="--price"):
            read_prices(wrong, "H100")
    file.write_text("[1]")
    with pytest.raises(BadInput, match="holds no prices"):
        read_prices(str(file), "H100")
    with pytest.raises(BadInput, match="--tokens"):
        budget_of(None, "2.5", "H100")
    file.write_text('{"A100-80G": 1.5}')
    with pytest.raises(BadInput, match="no price of H100"):
        read_prices(str(file), "H100")


@pytest.mark.parametrize("layouts", [(), ("--layouts",)])
def test_recommend_says_what_the_training_takes(cli: Cli, layouts: tuple[str, ...]) -> None:
    asked = ("recommend", "meta-llama/Llama-3.1-8B", "--gpu", "8xH100", "--nodes", "2", "--seq-len", "1024", *layouts)
    code, said, _ = cli(*asked, "--tokens", "10B", "--price", "2")
    assert code == 0
    assert "10,000,000,000 tokens: " in said
    answer = json.loads(cli(*asked, "--tokens", "10B", "--price", "2", "--json")[1])
    training, best = answer["training"], answer["ranking"][0]
    assert training["price"] == pytest.approx(2 * training["gpu_hours"])
    assert training["days"] == pytest.approx(10**10 / best["tokens_per_second"] / 86400 / training["goodput"])
    assert training["gpu_hours"] == pytest.approx(16 * 24 * training["days"])
    found = recommend(
        "meta-llama/Llama-3.1-8B", gpu="8xH100", nodes=2, seq_len=1024, layouts=bool(layouts), tokens="10B", price=2
    )
    assert found.training is not None
    assert found.training.to_dict() == training
    assert "10,000,000,000 tokens: " in str(found)
    with pytest.raises(BadInput, match="name the model"):
        recommend(gpu="8xH100", tokens="10B")
    code, _, errors = cli("recommend", "--gpu", "8xH100", "--tokens", "10B")
    assert (code, "name the model" in errors) == (2, True)


def test_scale_shows_the_training(cli: Cli) -> None:
    asked = ("scale", "gpt2", "--gpu", "H100", "--gpus", "8", "--seq-len", "1024", "--tokens", "10B", "--price", "2")
    code, said, _ = cli(*asked, "--wide")
    assert code == 0
    assert "GPU hours" in said
    assert "goodput" in said
    point = json.loads(cli(*asked, "--json")[1])["points"][0]
    training = point["training"]
    assert training["price"] == pytest.approx(2 * training["gpu_hours"])
    assert training["days"] == pytest.approx(10**10 / point["tokens_per_second"] / 86400 / training["goodput"])
    assert "training" not in json.loads(cli(*asked[:-4], "--json")[1])["points"][0]
