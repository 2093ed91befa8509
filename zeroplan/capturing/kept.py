"""A capture that was kept in a file (``capture -o``), answered again: for the same machine or another one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroplan.capturing.answer import CapturedRun, answer
from zeroplan.capturing.result import of_data
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.files import is_capture, read_bytes
from zeroplan.simulate.allocator.config import AllocatorConfig

#: The key under which a kept answer holds what was captured.
RECORDING = "recording"
#: The most bytes that are read of such a file.
_MOST = 256 << 20


def kept_capture(files: Sequence[Any]) -> dict[str, Any] | None:
    """Return the data of a kept capture; None where `files` is another program's, or several.

    Raises:
        BadInput: a capture beside other files, or one that is cut off.
    """
    found = [one for one in files if isinstance(one, (str, Path)) and is_capture(str(one))]
    if not found:
        return None
    if len(files) > 1:
        raise BadInput("is the whole run, and stands beside no other file", where=str(found[0]), remedy="give it alone")
    try:
        held: dict[str, Any] = json.loads(read_bytes(str(found[0]), _MOST))
    except ValueError:
        raise BadInput("is a captured run that is cut off", where=str(found[0]), remedy="capture again") from None
    return held


def answered_again(
    held: dict[str, Any],
    *,
    where: str,
    gpu: str | None = None,
    vram: str | int | None = None,
    gpus: int = 1,
    nodes: int = 1,
    config: AllocatorConfig | None = None,
) -> CapturedRun:
    """Return the answer to a kept capture.

    Args:
        held: the file's data.
        where: its name.
        gpu: another card; None for the captured one.
        vram: another limit; None for the card's.
        gpus: has to be what the launcher started, or 1 for nothing said.
        nodes: likewise.
        config: the caching allocator's settings; None for those of the command.

    Raises:
        BadInput: no capture, or a machine of another number of ranks.
    """
    captured = of_data(held[RECORDING], where)
    machine = held.get("cluster", {})
    then = (int(machine.get("gpus", 1)), int(machine.get("nodes", 1)))
    if (gpus, nodes) not in ((1, 1), then):
        raise BadInput(
            f"was captured on {then[1]} × {then[0]} GPUs, and a rank's own allocations are those of that world",
            where=where,
            remedy="capture it again with the other number of processes",
        )
    if gpu is None and vram is None:
        gpu, vram = machine.get("gpu"), machine.get("vram")
        if vram is None:
            gpu = None
    if config is None and captured.machine.get("alloc_conf"):
        config = AllocatorConfig.parse(captured.machine["alloc_conf"], where=where)
    return answer(captured, replace(Cluster.of(gpu=gpu, vram=vram), gpus=then[0], nodes=then[1]), config)
