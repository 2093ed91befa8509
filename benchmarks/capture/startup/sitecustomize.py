"""Writes, as a Python process ends, what torch's allocator says of it: one line of JSON a process, into $CAPTURE_MEASURED.

Python imports a module of this name at its start, so that a command is measured unchanged, whatever launcher starts it.
"""

import atexit
import json
import os
import sys
import time

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
