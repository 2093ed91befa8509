"""The published figures, and what is planned for each.

``rows.jsonl`` has a figure a line: where it is printed, the request that describes its run, what is planned, and, where the two
differ, why. ``models.json`` has the models by the names that requests use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.sizes import GIB
from zeroplan.engines.megatron.chunk import ChunkLayers, chunk_tape
from zeroplan.engines.megatron.shapes import Shapes
from zeroplan.models.load import load_model
from zeroplan.models.megatron import MegatronModel
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import Mark, Op

FOLDER = Path(__file__).resolve().parent
ROWS = FOLDER / "rows.jsonl"
_MODELS: dict[str, dict[str, Any]] = json.loads((FOLDER / "models.json").read_text())
#: Digits that are kept of a planned figure: more than any paper prints.
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure.

    Attributes:
        id: its name.
        source: the paper and the place in it.
        what: which of its cells.
        figure: what the number is, a key of :data:`FIGURES`.
        published: the number as it is printed, so that its digits can be counted.
        holds: how the planned number must lie to it: ``equal`` to its printed digits, ``at most`` or ``at least``.
        request: the run, as fields of a Ask; for the figures of a layer, its shapes.
        planned: what zeroplan plans.
        miss: why the plan does not hold to the figure; empty where it does.
    """

    id: str
    source: str
    what: str
    figure: str
    published: str
    holds: str
    request: dict[str, Any]
    planned: float
    miss: str = ""

    def agrees(self, planned: float) -> bool:
        """Return whether a planned number lies to the published one as it must."""
        printed = float(self.published)
        if self.holds == "at most":
            return planned <= printed
        if self.holds == "at least":
            return planned >= printed
        _, _, decimals = self.published.partition(".")
        return abs(planned - printed) < 10.0 ** -len(decimals)  # papers cut digits off as often as they round


def load_rows() -> list[Row]:
    """Return all rows."""
    return [Row(**json.loads(line)) for line in ROWS.read_text().splitlines()]


def plan(row: Row) -> float:
    """Return what is planned for a row, to six digits."""
    found = FIGURES[row.figure][1](row.request)
    return float(f"{found:.{_DIGITS}g}")


def _request(fields: dict[str, Any]) -> Ask:
    given = dict(fields)
    if isinstance(given.get("model"), str):
        given["model"] = _model(given["model"], given.pop("arguments", {}))
    return Ask(**given)


def _model(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a model's config with further arguments of Megatron-LM's."""
    config = dict(_MODELS[name])
    dense = config.pop("dense_layers", None)
    if dense is not None:
        config["moe_layer_freq"] = [int(layer >= dense) for layer in range(config["num_layers"])]
    return config | arguments


def _states(fields: dict[str, Any]) -> float:
    """Model states of one GPU, in GB."""
    return float(estimate_report(_request(fields)).plans[0].gpu.model_states / 1e9)


def _largest(fields: dict[str, Any]) -> float:
    """Parameters, in billions, of the largest model whose states fit: of all ranks that share each matrix together."""
    given = dict(fields)
    limit, shares = given.pop("limit"), given.pop("shares")
    below, above = 1, 1 << 44
    while above - below > below >> 16:
        middle = (below + above) // 2
        if _states({**given, "params": middle}) <= limit:
            below = middle
        else:
            above = middle
    return float(below * shares / 1e9)


def _parameters(fields: dict[str, Any]) -> float:
    """Parameters of the model, in billions."""
    return load_model(_model(fields["model"], {})).params / 1e9


def _total(fields: dict[str, Any]) -> float:
    """All memory of the GPU that needs the most, in GiB."""
    found = estimate_report(_request(fields)).plans[0].gpu.total
    assert found is not None, "no simulated plan"
    return found / GIB


def _disk(fields: dict[str, Any]) -> float:
    """Files of one node, in TB."""
    return float(estimate_report(_request(fields)).plans[0].nvme.per_node / 1e12)


def _layer(fields: dict[str, Any]) -> float:
    """Bytes that a layer keeps for its backward, divided by s·b·h: tokens, samples and channels."""
    model = MegatronModel.of(_model(fields["model"], fields.get("arguments", {})))
    tp, rows = fields["tp"], fields["micro_batch"]
    layout = ParallelLayout(gpus=tp, tp=tp, sp=fields["sp"])
    shapes = Shapes(model=model, micro_batch=rows, seq=fields["seq_len"], tp=layout.tp, sequence=layout.sp, flash=False)
    two, three = (kept(shapes, ChunkLayers(tuple(range(1, 1 + count)), False, False)) for count in (2, 3))
    return (three - two) / float(fields["seq_len"] * rows * model.hidden_size)


def _saving(fields: dict[str, Any]) -> float:
    """What the row's arguments save of what a layer keeps, in per cent."""
    return 100 * (1 - _layer(fields) / _layer({**fields, "sp": False, "arguments": {}}))


def kept(shapes: Shapes, part: ChunkLayers) -> int:
    """Return the bytes that are there when the backward begins."""
    tape = chunk_tape(shapes, part).tape
    now, sizes = 0, {}
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.MARK and arg == Mark.BACKWARD_BEGIN:
            return now
        if op == Op.ALLOC:
            sizes[arg] = aux
            now += aux
        elif op == Op.FREE:
            now -= sizes[arg]
    raise AssertionError("no backward")


#: By the figure's name, what its column is called, and how it is planned.
FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "states": ("model states, GB a GPU", _states),
    "largest": ("largest model, billions of parameters", _largest),
    "largest-trillions": ("largest model, trillions of parameters", lambda fields: _largest(fields) / 1000),
    "parameters": ("billions of parameters", _parameters),
    "total": ("GiB a GPU", _total),
    "disk": ("TB a node on disk", _disk),
    "layer": ("bytes a layer keeps, in s·b·h", _layer),
    "saving": ("% saved of what a layer keeps", _saving),
}


def shown(number: float) -> str:
    """Return a planned figure as the tables print it."""
    digits = 4 if number < 1 else max(0, 3 - math.floor(math.log10(number)))
    return f"{number:,.{digits}f}"
