"""What differs between two answers: keys or options, the figures, and the lines of the ledger, largest change first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.plumbing.documents import Limits, parse_json, text_of
from zeroplan.core.plumbing.files import read_bytes
from zeroplan.core.sizes import format_bytes, format_gib
from zeroplan.report.table import render
from zeroplan.report.terminal import PLAIN, Terminal

#: An answer with every plan's timeline of peaks is larger than a configuration that people write.
_ANSWER = Limits(size=64 << 20, depth=64, nodes=4_000_000)
#: What follows from other options.
_DERIVED = ("cluster.usable_vram", "cluster.usable_cpu_ram", "cluster.ranks")
_SIZES = ("cluster.vram", "cluster.cpu_ram", "cluster.nvme")
_PLAN = ("engine", "engine_version", "stage", "offload_optimizer", "offload_param", "depth")
_ROW = ("micro_batch", "grad_accum", "gradient_checkpointing", "compile", "alloc_conf")


@dataclass(frozen=True, slots=True)
class PrintedPlan:
    """One plan of an answer that ``--json`` printed, with the options it was made for."""

    plan: MemoryPlan
    options: dict[str, Any]

    @property
    def key(self) -> tuple[str, int, str, str]:
        """The configuration, by which plans of two answers are paired."""
        return self.plan.engine, self.plan.stage, self.plan.offload_optimizer, self.plan.offload_param


@dataclass(frozen=True, slots=True)
class Moved:
    """An option, a figure or a line that differs; None where one of the two has none. Figures and lines are in bytes."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Two plans, and the options, figures and ledger lines in which they differ; of files their keys, too."""

    a: PrintedPlan
    b: PrintedPlan
    options: tuple[Moved, ...]
    figures: tuple[Moved, ...]
    lines: tuple[Moved, ...]
    keys: tuple[Moved, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; bytes are integers."""
        parts = {"keys": self.keys, "options": self.options, "figures": self.figures, "lines": self.lines}
        plans = {"a": self.a.plan.label, "b": self.b.plan.label}
        return {"schema": 1, "plans": plans, **{name: [asdict(one) for one in moved] for name, moved in parts.items()}}


def diff_answers(a: str, b: str) -> PlanDiff:
    """Compare two files that ``estimate``, ``recommend`` or ``capture`` printed by ``--json``.

    Raises:
        BadInput: a file that cannot be read, or that holds no such answer.
    """
    return diff_plans(printed_plans(_parsed(a), a), printed_plans(_parsed(b), b))


def diff_plans(
    ours: Sequence[PrintedPlan],
    theirs: Sequence[PrintedPlan],
    files: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
) -> PlanDiff:
    """Compare two answers: of many plans the first of `ours` that `theirs` has, too, else, and of a capture, the first of each.

    Args:
        ours: the plans of one.
        theirs: of the other.
        files: what the files that they are of say, by key.
    """
    captured = any(plans[0].plan.capture is not None for plans in (ours, theirs))  # whose first plan is the run itself
    pairs = ((one, other) for one in ours for other in theirs if one.key == other.key and not captured)
    one, other = next(pairs, (ours[0], theirs[0]))
    options = _moved(one.options, other.options)
    figures = _by_size(_figures(one.plan), _figures(other.plan))
    keys = () if files is None else _moved(dict(_flat(files[0])), dict(_flat(files[1])))
    return PlanDiff(one, other, options, figures, _by_size(_lines(one.plan), _lines(other.plan)), keys)


def printed_answer(path: str) -> Any:
    """Return what a verb printed by ``--json`` into a file; None where it holds something else.

    Raises:
        BadInput: a file that cannot be read.
    """
    if not path.lower().endswith(".json"):
        return None
    data = _parsed(path)
    return data if isinstance(data, dict) and ("plans" in data or "ranking" in data) else None


def _parsed(path: str) -> Any:
    return parse_json(text_of(read_bytes(path, _ANSWER.size), path), path, _ANSWER)


def printed_plans(data: Any, path: str) -> list[PrintedPlan]:
    """Return the plans of an answer in JSON; of a ranking the best.

    Raises:
        BadInput: it has none.
    """
    try:
        shared = dict(_flat({name: data[name] for name in ("model", "workload", "cluster")}))
        shared["plan.zeroplan"] = data.get("zeroplan", {}).get("version")
        rows = data["plans"] if "plans" in data else [{**data["ranking"][0]["plan"], "row": data["ranking"][0]}]
        found = [_printed(dict(row), shared) for row in rows]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ValidationError):
        found = []
    if not found:
        remedy = "give what estimate, recommend or capture of this version print with --json"
        raise BadInput("holds no plan", where=path, remedy=remedy)
    return found


def _printed(row: dict[str, Any], shared: Mapping[str, Any]) -> PrintedPlan:
    chosen = row.pop("row", {})
    row.pop("peak", None)  # estimate --peak
    decided = {f"workload.{name}": chosen[name] for name in _ROW if name in chosen}
    options = {**shared, **decided, **{f"plan.{name}": row[name] for name in _PLAN}}
    return PrintedPlan(MemoryPlan.model_validate(row), {key: value for key, value in options.items() if key not in _DERIVED})


def _flat(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _figures(plan: MemoryPlan) -> dict[str, int | None]:
    gpu = plan.gpu
    return {
        "GPU: total": gpu.total,
        "GPU: peak allocated": gpu.peak_allocated,
        "GPU: peak reserved": gpu.peak_reserved,
        "GPU: outside torch": gpu.outside_torch,
        "host: per node": plan.cpu.per_node,
        "NVMe: per node": plan.nvme.per_node,
    }


def _lines(plan: MemoryPlan) -> dict[str, int | None]:
    """Return the most bytes that the lines of each buffer and place have in a phase: two copies may follow each other."""
    phases: dict[str, dict[str, int]] = {}
    for line in plan.lines:
        held = phases.setdefault(f"{line.buffer} ({line.place})", {})
        for phase in line.phases:
            held[phase] = held.get(phase, 0) + line.bytes
    return {name: max(held.values(), default=0) for name, held in phases.items()}


def _moved(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Moved, ...]:
    return tuple(Moved(name, a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name))


def _by_size(a: Mapping[str, int | None], b: Mapping[str, int | None]) -> tuple[Moved, ...]:
    return tuple(sorted(_moved(a, b), key=lambda one: -abs((one.b or 0) - (one.a or 0))))


def diff_text(found: PlanDiff, terminal: Terminal = PLAIN, *, quiet: bool = False) -> str:
    """Return the change of the GPU's total, the options that differ, and tables of figures and lines in GiB."""
    lines = terminal.wrap(_verdict(found))
    if quiet:
        return "\n".join(lines)
    if len(said := found.keys or found.options) > 1:
        lines += ["", *terminal.items([_option(one) for one in said])]
    for header, moved in (("figure", found.figures), ("line", found.lines)):
        if moved:
            rows = [[one.name, *_sizes(one)] for one in moved]
            table = render([header, "A", "B", "B − A"], rows, "plain", width=terminal.width).splitlines()
            lines += ["", terminal.bold(table[0]), *table[1:]]
    return "\n".join(
        [*lines, "", terminal.dim("GiB. A line counts in the phase in which it is largest.")] if found.figures else lines
    )


def _verdict(found: PlanDiff) -> str:
    a, b = found.a.plan, found.b.plan
    labels = a.label if a.label == b.label else f"{a.label} → {b.label}"
    total = next((one for one in found.figures if one.name == "GPU: total"), None)
    change = "the GPU's total is the same" if total is None else f"the GPU's total {' → '.join(_sizes(total)[:2])} GiB"
    said = found.keys or found.options
    if not said:
        return f"{labels}: {change}; no option differs."
    why = _option(said[0]) if len(said) == 1 else f"{len(said)} {'keys' if found.keys else 'options'}"
    return f"{labels}: {change}, by {why}."


def _option(one: Moved) -> str:
    """Name what differs: a key of a file as it stands there, an option in words."""
    sizes = one.name in _SIZES
    a, b = ("none" if value is None else format_bytes(value) if sizes else value for value in (one.a, one.b))
    named = one.name.partition(".")[0] in ("model", "workload", "cluster", "plan")
    return f"{one.name.rpartition('.')[2].replace('_', ' ') if named else one.name} {a} → {b}"


def _sizes(one: Moved) -> list[str]:
    change = f"{((one.b or 0) - (one.a or 0)) / 2**30:+.3f}"
    return ["" if value is None else format_gib(value, digits=3) for value in (one.a, one.b)] + [change]
