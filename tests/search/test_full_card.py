"""What an answer says of a run that fills the card only where the host runs far ahead of the GPU."""

from types import SimpleNamespace
from typing import cast

from zeroplan.ledger.traffic import Executor
from zeroplan.report.step_time import verdict
from zeroplan.run.ask import Ask
from zeroplan.search import reasons
from zeroplan.search.explain_time import explain_time
from zeroplan.search.recommend import Ranked


def _full(low: int, emptied: int = 2) -> Ranked:
    """A run that fills a card of 80 GiB, whose interval begins at `low` GiB."""
    gpu = SimpleNamespace(at_limit=True, usable=80 << 30, interval=(low << 30, 80 << 30), cache_emptied=emptied)
    time = SimpleNamespace(busy={Executor.STALL: 0.93}, tokens_per_second=98.0)
    return cast(Ranked, SimpleNamespace(plan=SimpleNamespace(gpu=gpu), time=time))


def test_a_card_that_only_a_far_lead_of_the_host_fills_costs_up_to_its_retries() -> None:
    best = cast(Ranked, SimpleNamespace(time=SimpleNamespace(tokens_per_second=100.0)))
    (said,) = reasons._full_card(_full(58))
    assert "costs up to 0.93 s; 58.0 GiB may do" in said
    assert reasons._loss(_full(58), best) == "costs up to 2.0 % of the speed, and that only if the card fills (58.0 GiB may do)"
    (sure,) = reasons._full_card(_full(76))
    assert sure.endswith("empties its cache 2 × a step and so costs 0.93 s")
    assert reasons._loss(_full(76), best) == reasons._loss(_full(58, emptied=0), best) == "costs 2.0 % of the speed"


def test_a_time_says_where_the_card_has_no_room_for_the_run() -> None:
    words = {"model": "Qwen/Qwen2.5-0.5B", "stage": 3, "micro_batch": 4}
    small, large = (explain_time(Ask(**words, vram=size << 30))[0] for size in (8, 80))
    assert (small.beyond, large.beyond) == (True, False)
    assert small.time.total == large.time.total
    assert verdict(small) == f"{verdict(large)} The card is too small for it by the figures: this is the time on one with room."
