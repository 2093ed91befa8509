"""The other ranks of a group that shares experts, where they are fake."""

from __future__ import annotations

from unittest import mock

from torch.distributed import _functional_collectives as collectives


def answer_for_fake_ranks() -> None:
    """Let the others tell that they have as many tokens for each expert as this rank."""
    mock.patch.object(collectives, "all_to_all_single", lambda tensor, *_: tensor.clone()).start()
