"""A whole training: how long it takes for a budget of tokens, what fails on the way, its energy and its price.

Note [Goodput]
    GPUs fail independently of each other, so n of them fail n times as often. A training saves its state every τ, which takes
    δ; after a failure it starts again, which takes R, and repeats what it did since the last save, τ / 2 in the mean. Of its
    time

        δ / τ + τ / 2M + R / M

    is lost, with M the mean time between failures; τ = √(2 δ M) loses the least (Young 1974, "A first order approximation to
    the optimum checkpoint interval"). Where more than half would be lost that approximation does not hold, and nothing is said.

    The rate of failures is BLOOM's: 1 to 2 GPUs a week of about 400 (Bekman 2022, "The Technology Behind BLOOM Training"). It
    foretells 474 failures for 16,384 GPUs in 54 days, in which Llama 3 counted 419 unexpected interruptions (arXiv
    2407.21783, table 5); a test holds that. What a start takes, ten minutes, is MegaScale's time to detect, diagnose and
    resume (arXiv 2402.15627, section 6.3). All of it is arithmetic: nothing here was measured.

Note [Spares and stragglers]
    Nodes fail as their GPUs do, so that as many fail in a week as a Poisson law says; spare nodes are as many as are enough in
    98 of 100 weeks. Of BLOOM's rate on its 48 nodes that is 4, as many as it kept (BLOOM's model card). A step waits for its
    slowest host. One that computes a tenth longer, as MegaScale found some (section 6.3), makes all do so: that is the most
    that one costs, where computation takes the whole step. One more node is taken to do as much as each other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import CONFIG, parse_json, text_of
from zeroplan.core.plumbing.files import read_bytes
from zeroplan.core.sizes import parse_count
from zeroplan.planner.resolve import resolve
from zeroplan.search.machine_rates import machine_rates

if TYPE_CHECKING:
    from zeroplan.run.ask import Ask
    from zeroplan.search.layout_answer import LaidOut, LayoutAnswer
    from zeroplan.search.results import Recommendation, SearchResult

#: Failures of a GPU and day: 1.5 a week of 400.
FAILURES_PER_DAY = 1.5 / 7 / 400
#: Seconds from a failure to the first new step.
RESTART_SECONDS = 600.0
#: Bytes that a saved parameter takes: fp32 master and two moments, and 16 bits.
_SAVED_BYTES = 14
_DAY, _HOUR = 86_400, 3_600
#: Weeks in which the spare nodes are enough, and by how much a slow host computes longer. See Note [Spares and stragglers].
_ENOUGH, _SLOWER = 0.98, 0.10
#: What is lost at most where the formula holds.
_MOST_LOST = 0.5
#: Watts of a card's board, of its data sheet.
BOARD_WATTS = {
    name: watts
    for watts, names in {
        70: ("T4",),
        72: ("L4",),
        165: ("A30",),
        300: ("V100-16G", "V100-32G", "L40", "A40", "A6000", "RTX6000Ada"),
        350: ("L40S", "RTX3090", "H100-PCIe"),
        400: ("A100-40G", "A100-80G", "A800-80G", "H100-NVL"),
        450: ("RTX4090",),
        575: ("RTX5090",),
        600: ("RTXPro6000",),
        700: ("H100", "H800", "H200"),
        750: ("MI300X",),
        1000: ("B200", "MI325X"),
        1400: ("MI355X",),
    }.items()
    for name in names
}


@dataclass(frozen=True, slots=True)
class Budget:
    """What is to be trained: `tokens`, and the price of a GPU hour by card, in any currency; empty without prices."""

    tokens: int
    prices: dict[str, float]


@dataclass(frozen=True, slots=True)
class WholeTraining:
    """One training.

    Attributes:
        days: from the first step to the last, with what failures cost; None where they would cost more than half.
        gpu_hours: of all GPUs in that time.
        failures: that are to be expected in it.
        save_seconds: between two checkpoints, the interval that loses the least.
        goodput: the part of the time in which new tokens are trained on.
        megawatt_hours: of the GPUs' boards at full power, without hosts and cooling; None where the card's is not known.
        price: of the GPU hours; None without a price of the card.
        spare_nodes: that replace those which fail in a week. See Note [Spares and stragglers].
        next_node_days: that one more node would save.
        slow_host_days: that one slow host would cost at most.
    """

    days: float | None
    gpu_hours: float | None
    failures: float | None
    save_seconds: float
    goodput: float | None
    megawatt_hours: float | None
    price: float | None
    spare_nodes: int
    next_node_days: float | None = None
    slow_host_days: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def training_on(
    budget: Budget | None, cluster: Cluster, best: Recommendation | LaidOut | None, *, params: int, write_gbs: float
) -> WholeTraining | None:
    """Return what a budget takes by an answer on its cluster; None without one of the two. See :func:`whole_training`."""
    if budget is None or best is None:
        return None
    ranks, speed = cluster.gpus * cluster.nodes, best.tokens_per_second
    sizes: dict[str, Any] = {"ranks": ranks, "nodes": cluster.nodes, "gpu": cluster.gpu.name, "params": params}
    return whole_training(budget, tokens_per_second=speed, write_gbs=write_gbs, **sizes)


def training_of_search(budget: Budget | None, found: SearchResult) -> WholeTraining | None:
    """Return what a budget takes by the best configuration of a search."""
    sizes = {"params": found.model["trainable"], "write_gbs": found.rates["write_gbs"]}
    return training_on(budget, found.cluster, found.best, **sizes)


def training_of_layout(
    budget: Budget | None, found: LayoutAnswer, profile: str | os.PathLike[str] | None
) -> WholeTraining | None:
    """Return what a budget takes by the layout that a search found on a machine of measured rates."""
    if budget is None or found.chosen is None:
        return None
    resolved = resolve(found.chosen.request)
    write_gbs = machine_rates(resolved.cluster, profile, []).write_gbs
    params = resolved.spec.parameters.trained_total
    return training_on(budget, resolved.cluster, found.chosen, params=params, write_gbs=write_gbs)


def training_json(one: WholeTraining | None) -> dict[str, Any]:
    """Return the key that an answer in JSON has for a whole training; none without a budget."""
    return {} if one is None else {"training": one.to_dict()}


def whole_training(
    budget: Budget, *, tokens_per_second: float, ranks: int, nodes: int, gpu: str, params: int, write_gbs: float
) -> WholeTraining:
    """Return what a budget of tokens takes. See Note [Goodput].

    Args:
        budget: the tokens, and prices.
        tokens_per_second: of all GPUs together.
        ranks: the GPUs.
        nodes: their nodes, each of which writes its part of a checkpoint.
        gpu: the card's name.
        write_gbs: 10^9 bytes a second that a node writes.
    """
    between = _DAY / (FAILURES_PER_DAY * ranks)
    saving = _SAVED_BYTES * params / (nodes * write_gbs * 1e9)
    interval = sqrt(2 * saving * between)
    lost = saving / interval + interval / (2 * between) + RESTART_SECONDS / between
    spare = spare_nodes(7 * _DAY / between)
    if lost > _MOST_LOST:
        return WholeTraining(None, None, None, interval, None, None, None, spare)
    seconds = budget.tokens / tokens_per_second / (1 - lost)
    hours = seconds / _HOUR * ranks
    watts, price = BOARD_WATTS.get(gpu), budget.prices.get(gpu)
    return WholeTraining(
        days=seconds / _DAY,
        gpu_hours=hours,
        failures=seconds / between,
        save_seconds=interval,
        goodput=1 - lost,
        megawatt_hours=None if watts is None else hours * watts / 1e6,
        price=None if price is None else hours * price,
        spare_nodes=spare,
        next_node_days=seconds / _DAY / (nodes + 1),
        slow_host_days=_SLOWER * seconds / _DAY,
    )


def spare_nodes(failures: float) -> int:
    """Return the nodes that replace those of a week of so many failures. See Note [Spares and stragglers]."""
    count, part = 0, exp(-failures)
    enough = part
    while enough < _ENOUGH and part > 0:
        count += 1
        part *= failures / count
        enough += part
    return count if part > 0 else round(failures + 2 * sqrt(failures))  # where a week's failures are many, a normal law's


def budget_of(tokens: str | int | None, price: str | float | None, gpu: str | None) -> Budget | None:
    """Return what is to be trained, from what a user writes; None without a number of tokens.

    Raises:
        BadInput: no number of tokens, no price, or a price without tokens.
    """
    if tokens is None:
        if price is not None:
            raise BadInput("prices nothing", where="--price", remedy="give --tokens as well")
        return None
    card = Cluster.of(gpu=gpu).gpu.name
    count = parse_count(str(tokens), where="--tokens")
    return Budget(count, {} if price is None else read_prices(str(price), card))


def budget_of_model(tokens: str | int | None, price: str | float | None, request: Ask, *, sourced: bool) -> Budget | None:
    """Return what is to be trained of a request's model; arguments and errors as of :func:`budget_of`.

    Raises:
        BadInput: no model, or a run that files say.
    """
    budget = budget_of(tokens, price, request.gpu)
    if budget is not None and (sourced or request.model is None):
        what = "cannot stand beside --from" if sourced else "is of the training of one model"
        raise BadInput(what, where="--tokens", remedy="leave one of the two out" if sourced else "name the model")
    return budget


def read_prices(text: str, gpu: str) -> dict[str, float]:
    """Read the price of a GPU hour: a number for this card, or a JSON file of numbers by card, ``{"H100": 2.5}``.

    Raises:
        BadInput: neither, or a price that is none.
    """
    where = "--price"
    try:
        found: Any = {gpu: float(text)}
    except ValueError:
        if not os.path.exists(text):
            raise BadInput(f"{text[:40]!r} is no price", where=where, remedy="give a number, or a JSON file") from None
        found = parse_json(text_of(read_bytes(text, CONFIG.size), text), text)
    if not isinstance(found, dict):
        raise BadInput("holds no prices", where=text, remedy='write {"H100": 2.5}')
    for name, price in found.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < 1e6:
            raise BadInput(f"{str(price)[:40]!r} is no price", where=f"{where}: {name[:40]}", remedy="give a number above zero")
    if gpu not in found:
        raise BadInput(f"holds no price of {gpu}", where=text, remedy=f'add "{gpu}": 2.5')
    return {name: float(price) for name, price in found.items()}
