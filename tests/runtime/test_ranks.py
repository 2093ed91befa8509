"""The pool of ranks itself: what fails in it is named, and soon."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist

from tests.runtime.ranks import RankPool


def ends(group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 1:
        os._exit(9)
    dist.barrier(group)


def raises(group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 1:
        raise ValueError("of its own")
    threading.Event().wait()


def waits_for_ever(_: dist.ProcessGroup) -> None:
    threading.Event().wait()


def answers(group: dist.ProcessGroup) -> int:
    return dist.get_rank(group)


def test_what_fails_is_named_and_the_next_call_has_new_ranks() -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(AssertionError, match=r"rank 1 ended with exit code 9|rank 0 failed"):
            pool.run(2, ends)
        with pytest.raises(AssertionError, match=r"rank 1 failed:\n(.*\n)*ValueError: of its own"):
            pool.run(2, raises)
        assert pool.run(2, answers) == [0, 1]
        for limit in (1, 10, 100):  # a busy machine may not have begun within the first
            with pytest.raises(AssertionError, match=rf"ranks \[0\] did not answer within {limit} s\nrank 0:\n") as stuck:
                pool.run(1, waits_for_ever, timeout=limit)
            if "in waits_for_ever" in str(stuck.value):
                break
        assert "in waits_for_ever" in str(stuck.value)
    finally:
        pool.stop()
