"""DeepSpeed's own verdict on configs: a JSON line in, a JSON line out, until the input ends. Run as a script.

The engine is built on the CPU over a tiny model, one rank, with DeepSpeed's compiled kernels stubbed: no step is taken, so
what is asked is only which configs it refuses and which wrapper it builds.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import sys
from typing import Any
from unittest.mock import MagicMock


def main() -> None:
    os.environ.update(
        DS_ACCELERATOR="cpu",
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_SIZE="1",
    )
    answers, sys.stdout = sys.stdout, sys.stderr  # DeepSpeed prints
    import cpuinfo
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import builder
    from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder

    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    builder.OpBuilder.load = lambda self, verbose=True: MagicMock()  # no compiler, no kernels
    NotImplementedBuilder.load = builder.OpBuilder.load
    get_accelerator().is_fp16_supported = lambda: True
    cpuinfo.get_cpu_info = lambda: {"arch": "X86_64", "vendor_id_raw": "GenuineIntel", "flags": []}  # else it is measured
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    for line in sys.stdin:
        gc.freeze()  # else every collection, and DeepSpeed asks for many, goes through all that torch has imported
        print(json.dumps(verdict(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # threads that engines leave behind may end the process by a signal while it is torn down


def verdict(config: dict[str, Any]) -> dict[str, Any]:
    """Whether the parser, then the engine, takes the config, and what the engine built."""
    import deepspeed
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig

    answer: dict[str, Any] = {"parses": False, "builds": False, "error": "", "wrapper": "", "basic": ""}
    try:
        DeepSpeedConfig(copy.deepcopy(config))
        answer["parses"] = True
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=copy.deepcopy(config))
        answer["builds"] = True
        answer["wrapper"] = type(engine.optimizer).__name__
        answer["basic"] = type(engine.basic_optimizer).__name__
        engine.destroy()
    except BaseException as error:  # asserts, SystemError, KeyError: all of them are refusals
        answer["error"] = f"{type(error).__name__}: {error}"[:300]
    return answer


if __name__ == "__main__":
    main()
