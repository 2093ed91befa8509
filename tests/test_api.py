"""What Python users get: plans as a sequence, and answers that print themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import zeroplan
from zeroplan.core.errors import BadInput

MODEL = "openai-community/gpt2"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def plans() -> zeroplan.Plans:
    """Every stage and offload, on cards that hold some of them."""
    return zeroplan.estimate(MODEL, gpus=2, vram="2G", depth="formula")


def test_plans_are_a_sequence(plans: zeroplan.Plans) -> None:
    listed = list(plans)
    assert plans == listed
    assert plans == tuple(listed)
    assert plans == zeroplan.estimate(MODEL, gpus=2, vram="2G", depth="formula")
    assert plans != listed[:-1]
    assert plans != "plans"
    assert (len(plans), plans[-1], listed[2] in plans) == (len(listed), listed[-1], True)
    assert isinstance(plans[1:3], zeroplan.Plans)
    assert plans[1:3] == listed[1:3]
    assert plans[::-1][0] is listed[-1]


@pytest.mark.parametrize("vram, fits", [("1G", False), (None, None)])
def test_nothing_is_best_where_no_plan_is_known_to_fit(vram: str | None, fits: bool | None) -> None:
    found = zeroplan.estimate(MODEL, vram=vram, depth="formula")
    assert (found.fits, found.best) == (fits, None)


def test_best_is_the_first_that_fits() -> None:
    found = zeroplan.estimate(MODEL, gpus=2, vram="8G", seq_len=1024)
    assert found.fits is True
    assert found.best is next(plan for plan in found if plan.fits)


def test_tables(plans: zeroplan.Plans) -> None:
    assert len(plans.table().splitlines()) == 2 + len(plans)
    assert plans[0:2].table("csv").startswith("stage,offload,")
    assert plans._repr_html_().count("<tr>") == 1 + len(plans)
    with pytest.raises(BadInput, match="unknown format"):
        plans.table("yaml")


@pytest.mark.parametrize(
    "shown, holds",
    [
        ("plans[0]", "optim.exp_avg"),
        ("plans", "Needs 1017.9 MiB and activations a GPU at least: ZeRO-3, "),
        ("plans[0]._repr_html_()", "<td"),
        ("plans[0].model_copy()", "optim.exp_avg"),
    ],
)
def test_answers_print_themselves(shown: str, holds: str, fresh_python: Run) -> None:
    """In a process where nothing but the package was imported."""
    done = fresh_python(f"import zeroplan\nplans = zeroplan.estimate('{MODEL}', depth='formula')\nprint({shown})")
    assert holds in done.stdout, done.stderr


def test_a_plan_without_a_renderer_prints_its_repr(fresh_python: Run) -> None:
    code = (
        "from zeroplan.planner.estimate import estimate_report\nfrom zeroplan.run.ask import Ask\n"
        f"plan = estimate_report(Ask(model='{MODEL}', stage=2, depth='formula')).plans[0]\n"
        "print(plan, plan._repr_html_())"
    )
    done = fresh_python(code)
    assert done.stdout.startswith("<MemoryPlan deepspeed stage 2: "), done.stderr
    assert done.stdout.endswith("> None\n")


def test_plans_and_recommendations_are_frames() -> None:
    pandas = pytest.importorskip("pandas")
    plans = zeroplan.estimate("openai-community/gpt2", gpus=2, vram="24G")
    frame = plans.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == len(plans)
    assert list(frame["gpu_total"]) == [plan.gpu.total for plan in plans]
    assert list(frame["stage"]) == [plan.stage for plan in plans]
    assert {kind.kind for kind in frame[["gpu_total", "stage"]].dtypes} == {"i"}
    found = zeroplan.recommend("openai-community/gpt2", vram="24G", depth="formula")
    assert list(found.to_frame()["micro_batch"]) == [one.workload.batch.micro_batch for one in found]


def test_a_frame_without_pandas_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(BadInput, match=r"to_frame\(\): needs pandas; pip install pandas"):
        zeroplan.estimate(params=10**9, vram="24G").to_frame()
