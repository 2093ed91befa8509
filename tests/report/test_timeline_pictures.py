"""The timeline's picture and the HTML page: what they show is what was simulated, and nothing in them can break out."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import pytest

from zeroplan.core.buffers import Buffer
from zeroplan.core.families import family_of
from zeroplan.core.plan import CpuMemory, GpuMemory, MemoryPlan, ModelInfo, NvmeMemory, PeakShare, PlanLine, Report
from zeroplan.core.sizes import GIB, MIB
from zeroplan.report.plans_html import html_report
from zeroplan.report.timeline import DrawnRun, Frame, layers, timeline_svg
from zeroplan.report.verdict import verdict
from zeroplan.simulate.recorder import Recorder, simulate
from zeroplan.simulate.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def timeline():
    recorder = Recorder()
    recorder.alloc(4 * GIB, Buffer.PARAM_FULL, note="weights")
    recorder.mark("init")
    for _ in range(2):
        saved = [recorder.alloc(256 * MIB, Buffer.ACTIVATION, note=f"layer {at}") for at in range(8)]
        logits = recorder.alloc(GIB, Buffer.LOGITS, note="<head>")
        recorder.mark("fwd")
        recorder.free(logits)
        for handle in reversed(saved):
            gradient = recorder.alloc(128 * MIB, Buffer.GRAD_FULL)
            recorder.free(handle)
            recorder.free(gradient)
        recorder.mark("bwd")
    return simulate(recorder)


def report(**gpu: Any) -> Report:
    numbers = {"model_states": 4 * GIB, "fixed_buffers": 0, "live_after_step": 4 * GIB, "total": 8 * GIB, "usable": 10 * GIB}
    plan = MemoryPlan(
        engine="deepspeed", engine_version="0.19.8", stage=2, offload_optimizer="cpu", offload_param="none", depth="simulated",
        verdict="fits", fits=True, gpu=GpuMemory(**{**numbers, **gpu}), cpu=CpuMemory(per_node=3 * GIB, pinned=GIB),
        nvme=NvmeMemory(per_node=0),
        lines=(PlanLine(buffer="param.full", place="hbm", bytes=4 * GIB, phases=("init",), formula="a < b"),),
    )  # fmt: skip
    other = plan.model_copy(
        update={"stage": 3, "gpu": plan.gpu.model_copy(update={"total": 20 * GIB}), "verdict": "does not fit", "fits": False}
    )
    model = ModelInfo(name="<script>alert(1)</script>", params=2 * 10**9, trainable=2 * 10**9, source="")
    cluster = {
        "nodes": 1,
        "gpus": 2,
        "vram": 10 * GIB,
        "usable_vram": 10 * GIB,
        "cpu_ram": None,
        "usable_cpu_ram": None,
        "nvme": None,
        "layout": None,
    }
    work = {"dtype": "bf16", "optimizer": "adamw", "micro_batch": 1, "seq_len": 8, "grad_accum": 1}
    return Report(model=model, workload=work, cluster=cluster, plans=(other, plan), warnings=("<i>",))


def run_of(timeline: Timeline) -> DrawnRun:
    return DrawnRun(timeline, lambda buffer, note: str(note), lambda buffer, _: family_of(buffer))


def test_the_curve_adds_up_and_holds_the_peak(timeline):
    curve = timeline.curve(points=20)
    assert max(curve.allocated) == timeline.peak_allocated == 7 * GIB
    assert max(curve.reserved) == timeline.peak_reserved
    for at, allocated in enumerate(curve.allocated):
        assert sum(one.bytes[at] for one in layers(run_of(timeline), curve)) == allocated <= curve.reserved[at]
    assert max(timeline.allocated_by_event()) == timeline.peak_allocated
    assert list(curve.positions) == sorted(curve.positions)
    assert [name for _, name in curve.marks] == ["init", "fwd", "bwd", "fwd", "bwd"]
    assert curve.marks[-1][0] == pytest.approx(1.0)


def test_the_contents_of_the_peak(timeline):
    assert timeline.alive_by_buffer() == {Buffer.PARAM_FULL: 4 * GIB, Buffer.ACTIVATION: 2 * GIB, Buffer.LOGITS: GIB}
    by_note = timeline.alive_by_buffer_and_note()
    assert [note for _, note in by_note][:2] == ["weights", "<head>"]
    assert sum(by_note.values()) == timeline.peak_allocated
    assert timeline.peak_mark() == "fwd"


def test_the_picture_is_to_scale(timeline):
    run, frame = run_of(timeline), Frame()
    root = ElementTree.fromstring(timeline_svg(run, title="A & B", limit=8 * GIB))
    polygons = root.findall(f"{SVG}polygon")
    assert [polygon.find(f"{SVG}title").text for polygon in polygons] == [one.name for one in layers(run, timeline.curve())]
    heights = [float(point.split(",")[1]) for polygon in polygons for point in polygon.get("points").split()]
    top = 8 * GIB * 1.04
    assert min(heights) == pytest.approx(frame.y(7 * GIB, top), abs=0.1)
    assert max(heights) == pytest.approx(frame.y(0, top), abs=0.1)
    words = [text.text for text in root.findall(f"{SVG}text")]
    assert {"A & B", "usable 8.00 GiB", "peak 7.00 GiB"} <= set(words)


def test_a_limit_out_of_reach_does_not_squash_the_picture(timeline):
    assert "usable" not in timeline_svg(run_of(timeline), limit=80 * GIB)


def test_an_empty_run_can_be_drawn():
    root = ElementTree.fromstring(timeline_svg(run_of(simulate(Recorder()))))
    assert root.tag == f"{SVG}svg"


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.scripts, self.words = [], 0, []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "circle", "line", "rect", "polyline"):
            self.open.append(tag)
        self.scripts += tag == "script"

    def handle_endtag(self, tag):
        if tag not in ("circle", "line", "rect", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_whole_and_escapes_what_it_is_given(timeline):
    page = html_report(report(), {1: run_of(timeline)})
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.scripts == 6  # two of data, four that run; none from the model's name
    assert {"<i>", "a < b", "logits of <head>", "fits"} <= {word.strip() for word in tags.words}
    assert not re.search(r"src=|url\(|@import|href='(?!#)", page)


def test_the_page_opens_the_plan_of_the_verdict_alone(timeline):
    page = html_report(report(), {1: run_of(timeline)})
    assert re.findall(r"<details class='card plan' id='(plan-\d)'( open)?>", page) == [("plan-1", " open"), ("plan-0", "")]
    assert verdict(report()).partition(": ")[2] in page
    assert page.index("card verdict yes") < page.index("id='plan-1'") < page.index("All plans") < page.index("id='plan-0'")
    linked = set(re.findall(r"href='#([\w-]+)'", page))
    assert linked == {"plan-0", "plan-1"}
    assert linked <= set(re.findall(r"id='([\w-]+)'", page))


def test_the_points_beside_the_chart_are_the_curve(timeline):
    page = html_report(report(), {1: run_of(timeline)})
    data = json.loads(re.search(r"aria-label='GPU memory.*?<script type='application/json'>(.*?)</script>", page)[1])
    curve = timeline.curve(320)

    def sizes(text: str) -> list[int]:
        found: list[int] = []
        for one in text.split(","):
            found.append(data["unit"] * int(one) if one else found[-1])
        return found

    assert data["unit"] <= timeline.peak_reserved / 2**16
    assert sizes(data["allocated"]) == pytest.approx(list(curve.allocated), abs=data["unit"])
    shown = {name: sizes(text) for name, _, text in data["layers"]}
    for name, _, values in layers(run_of(timeline), curve):
        assert shown[name] == pytest.approx(list(values), abs=data["unit"])
    sums = [sum(column) for column in zip(*shown.values(), strict=True)]
    assert sums == pytest.approx(list(curve.allocated), abs=len(shown) * data["unit"])


def test_every_area_of_the_chart_has_a_name_on_the_page(timeline):
    """Also what is gone at the peak, as activations are where whole gradients make it."""
    parts = (PeakShare(what="parameters", bytes=4 * GIB), PeakShare(what="activations", bytes=3 * GIB))
    page = html_report(report(at_peak=parts), {1: run_of(timeline)})
    (said,) = re.findall(r"Elsewhere in the run: (.*?)</p>", page)
    assert re.sub(r"<[^>]*>", "", said) == "gradients up to 128.0 MiB, logits and loss up to 1.0 GiB."
    named = set(re.findall(r"<i class='chip' style='--c:(#\w+)'>", page))
    assert {color for _, color, _ in layers(run_of(timeline), timeline.curve(320))} <= named


def test_a_plan_of_formulas_alone_has_a_page():
    page = html_report(report(total=None, phases={"init": 5 * GIB}))
    assert "class='plot'" not in page
    assert "5.0 GiB" in page
