"""The tensors that verify counts on a CPU."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


def test_storages_that_are_resized_count_what_they_hold() -> None:
    """As FSDP2 frees and takes the memory of gathered parameters; behind the count, resizing is as it was."""
    import torch

    from zeroplan.validate.rank.probe import TensorCount

    count = TensorCount()
    with count:
        kept = torch.zeros(256)
        kept.untyped_storage().resize_(0)
        assert (count.now, count.peak) == (0, 1024)
        kept.untyped_storage().resize_(2048)
        assert (count.now, count.peak) == (2048, 2048)
        del kept
        assert count.now == 0
    after = torch.zeros(256)
    after.untyped_storage().resize_(0)
    assert (count.now, count.peak) == (0, 2048)
