"""What follows the captured steps: batches of other shapes, and branches on values that are invented."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.capture.test_capture import LOOP, capture
from zeroplan.capturing.batches import Pass, read_on, shapes_of
from zeroplan.capturing.branches import changes_nothing
from zeroplan.capturing.source import CodeLine

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm_ranks")

LOADER = LOOP.replace(
    "for step in range(3):\n",
    "from torch.utils.data import DataLoader\n"
    "lengths = LENGTHS\n"
    "loader = DataLoader([torch.zeros(n, 1024) for n in lengths], batch_size=1)\nfor batch in loader:\n",
).replace('torch.randn(256, 1024, device="cuda")', 'batch[0].to("cuda")')


def test_a_longer_batch_further_on_leaves_the_verdict_open(tmp_path: Path) -> None:
    _, run = capture(tmp_path, LOADER.replace("LENGTHS", "[8, 8, 8, 8, 8, 8, 512, 8]"))
    plan = run.report.plans[0]
    assert plan.fits is None
    says = next(one.says for one in plan.unmodelled if one.key == "batches")
    assert "batch 6 has a tensor of 1 x 512 x 1024, the largest that the model saw a tensor of 1 x 8 x 1024" in says


def test_batches_of_one_shape_are_counted(tmp_path: Path) -> None:
    captured, run = capture(tmp_path, LOADER.replace("LENGTHS", "[8] * 9"))
    assert run.report.plans[0].fits is True
    says = "3 batches went through the model, 9 were looked at (the loader ends there), all of one shape"
    assert captured.workload["batches"] == says


def test_without_a_loader_the_steps_are_compared(tmp_path: Path) -> None:
    _, run = capture(tmp_path, LOOP.replace("(256, 1024", "(64 + 64 * step, 1024"))
    plan = run.report.plans[0]
    assert plan.fits is None
    assert [one.key for one in plan.unmodelled] == ["batches"]


def test_a_batch_that_was_drawn_ahead_was_not_seen() -> None:
    import torch

    one = Pass(iter(()), 0)
    one.drawn = [shapes_of({"ids": torch.zeros(2, n)}) for n in (8, 8, 64)]
    found = read_on([one], 2)
    assert found is not None
    assert found.open
    assert read_on([one], 3).open is False  # type: ignore[union-attr]


def test_the_tensor_that_is_larger_is_named() -> None:
    import torch

    one = Pass(iter([{"long": torch.zeros(2, 8), "short": torch.zeros(2, 5)}]), 0)
    one.drawn = [shapes_of({"long": torch.zeros(2, 9), "short": torch.zeros(2, 4)})]
    found = read_on([one], 1)
    assert found is not None
    assert found.says.endswith("batch 1 has short of 2 x 5, the largest that the model saw short of 2 x 4")


def test_smaller_batches_are_covered_unless_the_rest_is_unread() -> None:
    import itertools

    import torch

    ends, goes_on = Pass(iter([torch.zeros(1, 4)] * 3), 0), Pass(itertools.repeat(torch.zeros(1, 4)), 0)
    for one in (ends, goes_on):
        one.drawn = [shapes_of(torch.zeros(2, 8))]
    assert read_on([ends], 1).open is False  # type: ignore[union-attr]
    assert read_on([goes_on], 1, seconds=0.05).open is True  # type: ignore[union-attr]


def test_a_branch_on_an_invented_value_leaves_the_verdict_open(tmp_path: Path) -> None:
    code = LOOP + "if model.weight.sum() > 3:\n    more = torch.zeros(1 << 30, device='cuda')\n"
    _, run = capture(tmp_path, code)
    plan = run.report.plans[0]
    assert plan.fits is None
    assert f"{tmp_path / 'train.py'}:10: a condition" in next(one.says for one in plan.unmodelled if one.key == "condition")


@pytest.mark.parametrize(
    ("code", "holds", "nothing"),
    [
        ("if x.any():\n    raise ValueError\n", False, True),
        ("if not x.all():\n    print('no')\n", True, True),
        ("if torch.isnan(loss):\n    y = z.cuda()\n", False, True),
        ("if (\n    y\n    and torch.isnan(loss)\n):\n    y = z.cuda()\n", False, True),
        ("assert x.all()\n", True, True),
        ("if x.any():\n    y = z.cuda()\n", False, False),
        ("if x.any():\n    raise ValueError\nelse:\n    y = 1\n", True, False),
        ("while x.any():\n    pass\n", False, False),
        ("flag = x.any().item()\n", False, False),
    ],
)
def test_the_arm_that_is_not_taken(code: str, holds: bool, nothing: bool, tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(code)
    assert changes_nothing(CodeLine(str(file), 1), holds) is nothing
