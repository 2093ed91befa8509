"""Draws the pictures of the docs from what zeroplan answers: ``docs/pictures/*.svg``.

``python docs/pictures.py`` draws them anew, in some ten seconds; with ``--check`` it exits with 1 when one is stale. The
largest models are drawn from ``largest.json``, which ``docs/largest.py`` makes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zeroplan.core.buffers import Buffer
from zeroplan.core.families import Family, family_of
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.sizes import GIB, format_bytes
from zeroplan.planner.estimate import Estimate, estimate_runs
from zeroplan.planner.simulated import Simulated
from zeroplan.report import svg
from zeroplan.report.palette import FAMILY_COLORS
from zeroplan.report.timeline import drawn, layers, phase_name, ticks
from zeroplan.report.verdict import peak_sentence, relief_sentence, sizes_text, verdict
from zeroplan.run.ask import Ask
from zeroplan.simulate.timeline import Curve

FOLDER = Path(__file__).resolve().parent / "pictures"
MODEL = "meta-llama/Llama-3.1-8B"
WHERE = "Llama 3.1 8B on 8 × H100, bf16, AdamW, one sequence of 2,048 tokens a GPU, DeepSpeed"
WIDTH = 800
#: What is on a GPU beside the families of buffers: cached blocks of torch's allocator, and what no tensor is in.
CACHE, CONTEXT = "allocator's cache", "CUDA and NCCL"
#: What is on the host beside them: interpreters with what they map, and what allocators round up.
PROCESSES = "processes"
_GREYS = {CACHE: "#a9b4bf", CONTEXT: "#6c7884", PROCESSES: "#c8d0d9"}
#: Parts that are smaller than this share of a bar or an axis are left out of its words.
_LEAST = 0.02


def planned(stage: int, optimizer: str = "none", param: str = "none") -> Estimate:
    """Plan the run that the pictures show."""
    return estimate_runs(Ask(model=MODEL, gpus=8, gpu="H100", stage=stage, offload_optimizer=optimizer, offload_param=param))


def color_of(name: str) -> str:
    """Return the colour of a family or of one of the other parts."""
    return _GREYS.get(name) or FAMILY_COLORS[Family(name)]


def ordered(parts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the parts in the palette's order, so that a family is at the same place in every bar."""
    order = [*(family.value for family in FAMILY_COLORS), *_GREYS]
    return sorted(parts.items(), key=lambda part: order.index(part[0]))


def on_gpu(plan: MemoryPlan) -> dict[str, int]:
    """Return what one GPU holds at its peak: families of buffers, then the cache and what is outside torch. It adds up."""
    gpu = plan.gpu
    assert gpu.peak_allocated is not None
    assert gpu.peak_reserved is not None
    assert gpu.outside_torch is not None
    parts = {share.what: share.bytes for share in gpu.at_peak}
    return {**parts, CACHE: gpu.peak_reserved - gpu.peak_allocated, CONTEXT: gpu.outside_torch}


def bar(x: float, y: float, height: float, scale: float, parts: Mapping[str, int]) -> list[str]:
    """Draw parts side by side, `scale` pixels a GiB, with a hair of paper between two."""
    drawn = []
    for name, size in ordered(parts):
        width = scale * size / GIB
        if width < 0.3:
            continue
        box = f"x='{x:.1f}' y='{y:.1f}' width='{max(width - 0.7, 0.3):.1f}' height='{height:g}'"
        drawn.append(f"<rect {box} {svg.area(color_of(name))}><title>{name} {format_bytes(size)}</title></rect>")
        x += width
    return drawn


def legend(x: float, y: float, width: float, names: Iterable[str]) -> list[str]:
    """List names with their colours in lines."""
    parts, at = [], x
    for name in names:
        need = 22 + 6.9 * len(name) + 12
        if at + need > x + width:
            at, y = x, y + 20
        parts.append(f"<rect x='{at:.1f}' y='{y - 10:.1f}' width='11' height='11' rx='2' {svg.area(color_of(name))}/>")
        parts.append(svg.text(at + 17, y, name, size=12))
        at += need
    return parts


def heading(title: str, below: str, x: float = 24) -> list[str]:
    """Write the two lines on top of a picture."""
    return [svg.text(x, 32, title, size=17, weight=600), svg.text(x, 52, below, size=12, color="faint")]


def axis(x: float, width: float, top: float, foot: float, most: int, unit: str = "GiB") -> list[str]:
    """Draw round values of up to `most` bytes along a horizontal axis."""
    parts = []
    for value, label in ticks(most):
        at = x + width * value / most
        parts.append(svg.line(at, top, at, foot))
        parts.append(svg.text(at, foot + 16, label.replace("GiB", unit).strip(), size=11, color="faint", anchor="middle"))
    return parts


def zero_stages() -> str:
    """What each stage holds on one GPU at its peak, with the card's line."""
    names = {
        0: "Data parallel: every GPU holds everything",
        1: "ZeRO-1 shards the optimizer",
        2: "ZeRO-2 shards the gradients, too",
        3: "ZeRO-3 shards the parameters, too",
    }
    plans = {stage: planned(stage).report.plans[0] for stage in names}
    left, width, top, step = 24, WIDTH - 48, 86, 70
    most = max(plan.gpu.needed for plan in plans.values())
    scale, usable = width * GIB / most, plans[0].gpu.usable or 0
    foot = top + step * len(plans) - 8
    parts = heading("What one GPU holds at its peak", WHERE)
    at = left + scale * usable / GIB
    parts.append(svg.line(at, top - 14, at, foot + 6, "bad", width=1.6, dash="6 4"))
    parts.append(
        svg.text(at, foot + 20, f"the card: {usable / GIB:.1f} GiB", size=12, weight=600, color="bad", anchor="middle")
    )
    shown: dict[str, int] = {}
    for row, (stage, plan) in enumerate(plans.items()):
        y = top + row * step
        held = on_gpu(plan)
        shown |= {name: size for name, size in held.items() if size > _LEAST * plan.gpu.needed}
        parts += bar(left, y + 8, 26, scale, held)
        largest = [(share.what, share.bytes) for share in plan.gpu.at_peak[:4]]
        parts.append(svg.text(left, y, names[stage], size=13, weight=600, rim=True))
        end, words = left + scale * plan.gpu.needed / GIB, f"{plan.gpu.needed / GIB:.1f} GiB: "
        words, color = (words + "fits", "good") if plan.fits else (words + "does not fit", "bad")
        if end + 130 > left + width:
            parts.append(svg.text(end, y, words, size=13, weight=600, color=color, anchor="end"))
        else:
            parts.append(svg.text(end + 8, y + 26, words, size=13, weight=600, color=color, rim=True))
        parts.append(svg.text(left, y + 49, sizes_text(largest), size=11.5, color="faint", rim=True))
    parts += legend(left, foot + 50, width, [name for name, _ in ordered(shown)])
    return svg.picture(WIDTH, foot + 86, "ZeRO stages: what one GPU holds", parts)


def by_family(run: Simulated, curve: Curve) -> dict[str, tuple[int, ...]]:
    """Return the bytes of each family at each point of a run's curve, in the palette's order."""
    return {one.name: one.bytes for one in layers(drawn(run), curve)}


def stacked(
    stack: Mapping[str, Sequence[int]], xs: Sequence[float], y: Callable[[float], float], *, kept: float = 0.35
) -> list[str]:
    """Draw families above each other. Points that move the edge by less than `kept` pixels are left out."""
    below = [0] * len(xs)
    parts = []
    for name, sizes in stack.items():
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        edge = [
            *_thinned(xs, [y(value) for value in above], kept),
            *reversed(_thinned(xs, [y(value) for value in below], kept)),
        ]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in edge)
        parts.append(f"<polygon points='{points}' {svg.area(color_of(name))}><title>{name}</title></polygon>")
        below = above
    return parts


def _thinned(xs: Sequence[float], ys: Sequence[float], kept: float) -> list[tuple[float, float]]:
    points = list(zip(xs, ys, strict=True))
    shown = points[:1]
    for before, now in pairwise(points):
        if abs(now[1] - shown[-1][1]) >= kept:
            if shown[-1] != before:
                shown.append((before[0], shown[-1][1]))
            shown.append(now)
    return [*shown, points[-1]]


def step_stage3() -> str:
    """One step at stage 3, after the first: gathered layers, activations, gradients and the optimizer's step."""
    (run,) = planned(3).runs
    assert run is not None
    curve = run.simulation.timeline.curve(points=2400)
    marks = [(0.0, ""), *curve.marks][-4:]
    shares = (0.34, 0.46, 0.2)  # how wide forward, backward and step are drawn
    left, top, width, height = 62, 96, 470, 300
    points, xs, begin = [], [], float(left)
    bounds = []
    for share, ((start, _), (end, mark)) in zip(shares, pairwise(marks), strict=True):
        for point, position in enumerate(curve.positions):
            if start < position <= end:
                points.append(point)
                xs.append(begin + share * width * (position - start) / (end - start))
        begin += share * width
        bounds.append((begin, phase_name(mark)))
    stack = {
        name: [sizes[point] for point in points]
        for name, sizes in by_family(run, curve).items()
        if max(sizes[point] for point in points) > _LEAST * max(curve.allocated)
    }
    most = 1.05 * max(curve.allocated[point] for point in points)

    def y(value: float) -> float:
        return top + height * (1 - value / most)

    parts = heading("One step at ZeRO-3, on one GPU", WHERE)
    for value, label in ticks(most):
        parts.append(svg.line(left, y(value), left + width, y(value)))
        parts.append(svg.text(left - 8, y(value) + 4, label, color="faint", anchor="end"))
    parts += stacked(stack, xs, y)
    before = float(left)
    for end, name in bounds:
        parts.append(svg.text((before + end) / 2, top - 10, name, size=12, weight=600, anchor="middle"))
        parts.append(svg.line(end, top - 18, end, top + height, "faint"))
        before = end
    says = {
        Family.PARAMETERS: "a shard, always there",
        Family.GATHERED: "of a few layers, then freed",
        Family.MASTERS: "a shard in fp32",
        Family.OPTIMIZER: "two shards in fp32",
        Family.GRADIENTS: "a shard, in the step in fp32, too",
        Family.COMMUNICATION: "gathers and reduced buckets",
        Family.ACTIVATIONS: "kept forward, used up backward",
        Family.LOSS: "where forward meets backward",
    }
    x, at = left + width + 26, top - 10
    parts.append(svg.text(WIDTH - 20, at, "the most in this step", size=11, color="faint", anchor="end"))
    at += 24
    for name, sizes in reversed(stack.items()):
        parts.append(f"<rect x='{x}' y='{at - 10}' width='11' height='11' rx='2' {svg.area(color_of(name))}/>")
        parts.append(svg.text(x + 18, at, name, size=12, weight=600))
        parts.append(svg.text(WIDTH - 20, at, f"{max(sizes) / GIB:.1f} GiB", size=12, anchor="end"))
        parts.append(svg.text(x + 18, at + 15, says.get(Family(name), ""), size=11.5, color="faint"))
        at += 38
    foot = top + height + 22
    parts.append(svg.text(left, foot, "events in their order, not to scale in time", size=11, color="faint"))
    return svg.picture(WIDTH, foot + 20, "ZeRO-3: one step", parts)


def _on_host(plan: MemoryPlan) -> dict[str, int]:
    """Return what a node's host holds in the phase of its peak."""
    peak = next(one for one in plan.cpu.peaks if one.phase == plan.cpu.peak_phase)
    return _families((one.buffer, one.bytes) for one in peak.alive)


def _on_disk(plan: MemoryPlan, ranks: int) -> dict[str, int]:
    return _families((line.buffer, line.bytes * ranks) for line in plan.lines if line.place == "nvme")


def _families(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in sizes:
        buffer = Buffer(name)
        family = Family.PARAMETERS if buffer is Buffer.HOST_MODEL else family_of(buffer)
        key = PROCESSES if family is Family.OTHER else family.value
        found[key] = found.get(key, 0) + size
    return found


def offload() -> str:
    """What a GPU, the host and the disk of a node hold under each offload at stage 3."""
    rows = {
        "No offload": ("none", "none"),
        "Optimizer on the host": ("cpu", "none"),
        "Optimizer and parameters on the host": ("cpu", "cpu"),
        "Optimizer on disk": ("nvme", "none"),
        "Optimizer and parameters on disk": ("nvme", "nvme"),
    }
    plans = {name: planned(3, *where).report.plans[0] for name, where in rows.items()}
    held = {name: (on_gpu(plan), _on_host(plan), _on_disk(plan, 8)) for name, plan in plans.items()}
    columns = ("one GPU of 8", "host of the node", "disk of the node")
    left, gap, top, step = 24, 30, 96, 58
    width = (WIDTH - 2 * left - 2 * gap) / 3
    foot = top + step * len(rows)
    parts = heading("Who holds what under ZeRO-3", WHERE)
    for column, title in enumerate(columns):
        x = left + column * (width + gap)
        most = 1.32 * max(sum(places[column].values()) for places in held.values())
        parts.append(svg.text(x, top - 16, title, size=13, weight=600))
        parts += axis(x, width, top - 6, foot, round(most), unit="")
        for row, places in enumerate(held.values()):
            y = top + row * step
            parts += bar(x, y + 20, 18, width * GIB / most, places[column])
            total = sum(places[column].values())
            words = f"{total / GIB:.1f} GiB" if total else "nothing"
            end = x + width * total / most
            parts.append(svg.text(end + 7 * bool(total), y + 33, words, size=12, color="ink" if total else "faint", rim=True))
    for row, name in enumerate(rows):
        parts.append(svg.text(left, top + row * step + 13, name, size=12.5, weight=600, rim=True))
    shown = {name: size for places in held.values() for place in places for name, size in place.items() if size > GIB}
    parts += legend(left, foot + 44, WIDTH - 2 * left, [name for name, _ in ordered(shown)])
    return svg.picture(WIDTH, foot + 100, "Offload: what GPU, host and disk hold", parts)


def readme() -> str:
    """The verdict, and the run behind it under the card's line."""
    answer = planned(2)
    report, (run,) = answer.report, answer.runs
    assert run is not None
    (plan,) = report.plans
    curve = run.simulation.timeline.curve(points=900)
    stack = {name: sizes for name, sizes in by_family(run, curve).items() if max(sizes) > _LEAST * max(curve.allocated)}
    usable = plan.gpu.usable or 0
    left, top, width, height = 62, 148, 520, 268
    most = 1.06 * max(usable, *curve.reserved)

    def y(value: float) -> float:
        return top + height * (1 - value / most)

    head, colon, rest = verdict(report).partition(":")
    parts = [
        f"<rect x='0' y='0' width='6' height='106' {svg.fill('good' if plan.fits else 'bad')}/>",
        svg.text(24, 34, head + colon, size=20, weight=600, color="good" if plan.fits else "bad"),
        svg.text(24 + 11.2 * len(head + colon), 34, rest.strip(), size=17, weight=600),
        svg.text(24, 60, peak_sentence(plan), size=14),
        svg.text(24, 82, relief_sentence(report.reliefs), size=14),
        svg.text(24, 102, WHERE, size=12, color="faint"),
    ]
    for value, label in ticks(most):
        parts.append(svg.line(left, y(value), left + width, y(value)))
        parts.append(svg.text(left - 8, y(value) + 4, label, color="faint", anchor="end"))
    xs = [left + width * position for position in curve.positions]
    parts += stacked(stack, xs, y)
    reserved = _thinned(xs, [y(value) for value in curve.reserved], 0.35)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in reserved)
    parts.append(f"<polyline points='{points}' {svg.stroke('ink')} stroke-width='1.4' stroke-dasharray='5 3'/>")
    before = 0.0
    for end, mark in curve.marks:
        name = phase_name(mark)
        if (end - before) * width > 6.4 * len(name):
            parts.append(svg.text(left + width * (before + end) / 2, top - 8, name, color="faint", anchor="middle"))
        parts.append(svg.line(left + width * end, top - 4, left + width * end, top + height))
        before = end
    parts.append(svg.line(left, y(usable), left + width, y(usable), "bad", width=1.7, dash="7 4"))
    card = f"the card: {usable / GIB:.1f} GiB usable"
    parts.append(svg.text(left + width - 4, y(usable) + 16, card, size=12, weight=600, color="bad", anchor="end", rim=True))
    x, at = left + width + 24, top + 6
    peak = max(range(len(curve.allocated)), key=curve.allocated.__getitem__)
    parts.append(svg.text(x, at, "at the peak", size=12, weight=600))
    for name, sizes in reversed(stack.items()):
        if sizes[peak] < _LEAST * curve.allocated[peak]:
            continue
        at += 22
        parts.append(f"<rect x='{x}' y='{at - 10}' width='11' height='11' rx='2' {svg.area(color_of(name))}/>")
        parts.append(svg.text(x + 18, at, name, size=12))
        parts.append(svg.text(WIDTH - 20, at, f"{sizes[peak] / GIB:.1f}", size=12, anchor="end"))
    for words, size in (("allocated", curve.allocated[peak]), ("reserved, at most", max(curve.reserved))):
        at += 22
        parts.append(svg.text(x + 18, at, words, size=12, weight=600))
        parts.append(svg.text(WIDTH - 20, at, f"{size / GIB:.1f}", size=12, weight=600, anchor="end"))
    parts.append(svg.line(x, at - 4, x + 12, at - 4, "ink", width=1.4, dash="4 2"))
    return svg.picture(WIDTH, top + height + 24, "A verdict of zeroplan with the run behind it", parts)


def largest() -> str:
    """The largest model that each method trains on three machines, on a logarithmic scale."""
    found = json.loads((FOLDER / "largest.json").read_text())["largest"]
    machines = dict(zip(found, ("accent", "unsure", "good"), strict=True))
    methods = list(next(iter(found.values())))
    left, right, top, step = 226, 40, 112, 44
    width, foot = WIDTH - left - right, top + step * len(methods) - 8
    counts = [one["params"] for by_method in found.values() for one in by_method.values() if one["params"]]
    low, high = 0.7 * min(counts), 1.5 * max(counts)

    def x(params: float) -> float:
        return left + width * math.log(params / low) / math.log(high / low)

    below = "Layers of Llama 2 13B, as many as fit; bf16, AdamW, checkpointing, one sequence of 2,048 tokens a GPU"
    parts = heading("The largest model that trains", below)
    at = 24.0
    for machine, color in machines.items():
        parts.append(f"<circle cx='{at + 6:.1f}' cy='76' r='6' {svg.fill(color)}/>")
        parts.append(svg.text(at + 18, 80, machine, size=12.5))
        at += 190
    for tick in (1e9, 2e9, 5e9, 1e10, 2e10, 5e10, 1e11, 2e11, 5e11):
        if low < tick < high:
            parts.append(svg.line(x(tick), top - 12, x(tick), foot))
            parts.append(svg.text(x(tick), foot + 16, f"{tick / 1e9:g} B", color="faint", anchor="middle"))
    for row, method in enumerate(methods):
        y = top + row * step + 8
        parts.append(svg.text(24, y + 4, method, size=13, weight=600))
        sizes = [(found[machine][method]["params"], color) for machine, color in machines.items()]
        known = [params for params, _ in sizes if params]
        parts.append(svg.line(x(min(known)), y, x(max(known)), y, "line", width=3))
        drawn: list[float] = []
        for params, color in sizes:
            if not params:
                continue
            at, near = x(params), any(abs(x(params) - other) < 6 for other in drawn)
            drawn.append(at)
            parts.append(f"<circle cx='{at:.1f}' cy='{y + 9 * near}' r='6' {svg.fill(color)}/>")
            words = f"{params / 1e9:.1f}" if params < 1e11 else f"{params / 1e9:.0f}"
            parts.append("" if near else svg.text(at, y - 10, words, size=11.5, anchor="middle", rim=True))
    parts.append(svg.text(left + width, foot + 34, "parameters, on a logarithmic scale", size=11, color="faint", anchor="end"))
    return svg.picture(WIDTH, foot + 50, "The largest model by machine and method", parts)


PICTURES: dict[str, Callable[[], str]] = {
    "zero_stages.svg": zero_stages,
    "step_stage3.svg": step_stage3,
    "offload.svg": offload,
    "largest.svg": largest,
    "readme.svg": readme,
}


def main() -> None:
    """Draw the pictures, or check them."""
    stale = []
    for name, draw in PICTURES.items():
        path, drawn = FOLDER / name, draw()
        if "--check" not in sys.argv[1:]:
            path.write_text(drawn)
        elif not path.exists() or path.read_text() != drawn:
            stale.append(name)
    if stale:
        raise SystemExit(f"stale: {', '.join(stale)}; run python docs/pictures.py")


if __name__ == "__main__":
    main()
