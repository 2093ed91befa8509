"""A capture that was kept in a file (``capture -o``), answered again: for the same machine or another one."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroplan.capturing.answer import CapturedRun, answer
from zeroplan.capturing.result import Captured, as_data, of_data
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import is_capture, read_bytes, write_atomic
from zeroplan.core.sizes import GIB
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.config import AllocatorConfig

#: The key under which a kept answer holds what was captured.
RECORDING = "recording"
#: The most bytes that are read of such a file.
_MOST = 256 << 20


def keep(run: CapturedRun, captured: Captured, path: str) -> None:
    """Write an answer with its recording to a file."""
    held = {RECORDING: as_data(captured)} | json.loads(run.report.to_json())
    write_atomic(path, json.dumps(held))


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


#: Options that a recording leaves open: the machine, how it is asked, and which file it is.
_OPEN = frozenset(("files", "program", "gpu", "vram", "cpu_ram", "host", "gpus", "nodes", "alloc_conf", "offline", "token"))


def kept_run(request: Ask) -> CapturedRun | None:
    """Return the answer to a request that is of a kept capture, on the machine that it names; None for another request.

    Raises:
        BadInput: an option that a recording cannot vary, or a machine of another number of ranks.
    """
    held = kept_capture(request.files)
    if held is None:
        return None
    where = str(request.files[0])
    refuse_chosen(request, where)
    captured, cluster = recorded(held, request, where)
    return answer(captured, cluster, config_of(captured, request, where))


def refuse_chosen(request: Ask, where: str) -> None:
    """Refuse options that a recording cannot vary; `where` is its file.

    Raises:
        BadInput: there is one.
    """
    for name in request.chosen:
        if name not in _OPEN:
            flag = f"--{name.replace('_', '-')}" if name != "model" else "MODEL"
            raise BadInput(
                f"cannot be varied in a captured run, whose tensors are the script's own ({where})", where=flag,
                remedy="change it in the script, and capture that; the card can be varied: --gpu, --vram",
            )  # fmt: skip


def config_of(captured: Captured, request: Ask, where: str) -> AllocatorConfig | None:
    """Return the allocator's settings that a request names, or else the script's; None for torch's defaults."""
    conf = request.alloc_conf or captured.machine.get("alloc_conf", "")
    return AllocatorConfig.parse(conf, where=where) if conf else None


def refuse_captured(files: Sequence[Any]) -> None:
    """Refuse a kept capture where ranks are started, which run the script itself by another verb.

    Raises:
        BadInput: `files` is a kept capture.
    """
    held = kept_capture(files)
    if held is not None:
        command = held[RECORDING].get("command", "COMMAND")
        what = "is a captured run, of which only the script itself can be measured"
        raise BadInput(what, where=str(files[0]), remedy=f"zeroplan verify -- {command}")


def card_of(held: Mapping[str, Any]) -> dict[str, str]:
    """Return the option that names the card of a kept capture: ``gpu``, or ``vram`` if that was given; none without a limit."""
    machine = held.get("cluster", {})
    name, vram = str(machine.get("gpu")), machine.get("vram")
    if vram is None:
        return {}
    with contextlib.suppress(BadInput):  # a card that only a limit stands for has no name
        if Cluster.of(gpu=name).vram == vram:
            return {"gpu": name}
    return {"vram": f"{int(vram) / GIB:g}G"}


def recorded(held: Mapping[str, Any], request: Ask, where: str) -> tuple[Captured, Cluster]:
    """Return what a kept capture holds, and the machine: that of the capture, but for what the request names.

    Args:
        held: the file's data.
        request: names a card, a limit, or the number of ranks that there was.
        where: the file's name.

    Raises:
        BadInput: no capture, or a machine of another number of ranks.
    """
    captured = of_data(held[RECORDING], where)
    machine = held.get("cluster", {})
    then = Cluster(gpus=int(machine.get("gpus", 1)), nodes=int(machine.get("nodes", 1)))
    named = Cluster.of(gpus=request.gpus, nodes=request.nodes, gpu=request.gpu)
    if ("gpus" in request or "nodes" in request or named.gpus > 1) and (named.gpus, named.nodes) != (then.gpus, then.nodes):
        raise BadInput(
            f"was captured on {then.nodes} × {then.gpus} GPUs, and a rank's own allocations are those of that world",
            where=where,
            remedy="capture it again with the other number of processes",
        )
    gpu, vram = request.gpu, request.vram
    if gpu is None and (vram is not None or machine.get("vram") is not None):
        gpu, vram = machine.get("gpu"), vram if vram is not None else machine["vram"]
    card = None if gpu is None else re.sub(r"^\d+x", "", gpu)
    machine = Cluster.of(gpus=then.gpus, nodes=then.nodes, gpu=card, vram=vram, cpu_ram=request.cpu_ram, host=request.host)
    return captured, machine
