"""The table of recommended plans is what the search answers today, and what the page shows."""

import pytest

from benchmarks.layouts.recommended import CARDS, MODELS, NODES, kept, row


def test_the_table_has_a_row_for_each_model_card_and_number_of_nodes() -> None:
    rows = kept()
    assert [(one["card"], one["model"], one["nodes"]) for one in rows] == [
        (card, short, nodes) for card in CARDS for short, _ in MODELS.values() for nodes in NODES
    ]
    assert all(one["why"] for one in rows)


@pytest.mark.parametrize(
    ("model", "card", "nodes"),
    [("meta-llama/Llama-3.1-8B", "H100", 2), ("Qwen/Qwen3-32B", "H100", 1), ("meta-llama/Llama-3.1-405B", "L40S", 1)],
)
def test_rows_are_todays_answers(model: str, card: str, nodes: int) -> None:
    same = (one for one in kept() if (one["model"], one["card"], one["nodes"]) == (MODELS[model][0], card, nodes))
    assert row(model, card, nodes) == next(same)
