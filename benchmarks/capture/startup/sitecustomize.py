"""Writes, as a Python process ends, what torch's allocator says of it: one line of JSON a process, into $CAPTURE_MEASURED.

Python imports a module of this name at its start, so that a command is measured unchanged, whatever launcher starts it.
"""

import atexit
import json
import os
import sys
import time
from typing import Any

_BEGAN = time.time()


def _write() -> None:
    torch = sys.modules.get("torch")
    path = os.environ.get("CAPTURE_MEASURED")
    if path is None or torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    line = {
        "argv": sys.argv,
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "used_on_card": total - free,
        "seconds": time.time() - _BEGAN,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


atexit.register(_write)


def _follow_history() -> None:
    """Record every allocation with its lines of code, where $CAPTURE_HISTORY asks for what is alive at the peak."""
    import importlib.abc
    import importlib.util

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path, target=None):  # type: ignore[no-untyped-def]
            if fullname != "torch":
                return None
            sys.meta_path.remove(self)
            spec: Any = importlib.util.find_spec("torch")
            own = spec.loader.exec_module

            def run(module):  # type: ignore[no-untyped-def]
                own(module)
                module.cuda._lazy_call(lambda: module.cuda.memory._record_memory_history(max_entries=400_000, stacks="python"))
                atexit.register(_write_history)

            spec.loader.exec_module = run
            return spec

    sys.meta_path.insert(0, Finder())


def _write_history() -> None:
    """Write what was alive at the peak, by the innermost line outside torch: bytes and blocks."""
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    now = peak = at = 0
    for index, event in enumerate(events):
        sign = {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        now += sign * event["size"]
        if now > peak:
            peak, at = now, index
    alive = {}
    for event in events[: at + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    found: dict[str, tuple[int, int]] = {}
    for event in alive.values():
        frames = [one for one in event.get("frames", []) if one["filename"].endswith(".py")]
        outside = next((one for one in frames if "/torch/" not in one["filename"]), None)
        line = "" if outside is None else f"{outside['filename'][-60:]}:{outside['line']}"
        count, size = found.get(line, (0, 0))
        found[line] = count + 1, size + event["size"]
    rows = sorted(found.items(), key=lambda one: -one[1][1])[:80]
    with open(os.environ["CAPTURE_HISTORY"], "a", encoding="utf-8") as file:
        row = {"argv": sys.argv[:2], "rank": os.environ.get("RANK"), "peak": peak, "events": len(events), "alive": rows}
        file.write(json.dumps(row) + "\n")
    _write_events(events, f"{os.environ['CAPTURE_HISTORY']}.{os.getpid()}.gz")


def _write_events(events, path):  # type: ignore[no-untyped-def]
    """Write every event as a line: action, address, bytes, stream, and the innermost lines outside torch's own."""
    import gzip

    places: dict[str, int] = {}
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for event in events:
            frames = [one for one in event.get("frames", []) if one["filename"].endswith(".py")]
            outside = [one for one in frames if "/torch/" not in one["filename"]][:3]
            line = ";".join(f"{'/'.join(one['filename'].rsplit('/', 3)[1:])}:{one['line']}" for one in outside)
            at = places.setdefault(line, len(places))
            known = [line] if at == len(places) - 1 and line else []
            row = [event["action"], event.get("addr", 0), event["size"], event.get("stream", 0), at, *known]
            file.write(json.dumps(row) + "\n")


if "CAPTURE_HISTORY" in os.environ:
    _follow_history()
