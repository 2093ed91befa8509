"""Stand-ins for what hands a model to an engine, one file an engine; and what a captured run then is, for the planner.

Note [An engine's stand-in]
    Where a script calls an engine, the captured process calls a stand-in of the same surface. It keeps the whole model on this
    one process and shards nothing: the script's own forward, loss and backward run as they are, and each micro batch is
    recorded as a tape (:mod:`zeroplan.capturing.engines.micro_batches`). What the engine was told, as it resolved it itself,
    goes beside the tape to the planner (:mod:`zeroplan.capturing.engines.planned`), which lays the engine's schedule over it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture


def install(capture: Capture) -> None:
    """Attach every stand-in."""
    from zeroplan.capturing.engines import ddp, deepspeed, fsdp, fsdp2, megatron, runtime
    from zeroplan.capturing.hooks.imports import when_imported

    ddp.install(capture)
    megatron.MegatronSetup(capture).install()
    when_imported("torch.distributed.fsdp._fully_shard._fully_shard", lambda module: fsdp2.install(capture, module))
    when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", lambda module: fsdp.install(capture, module))
    when_imported("accelerate.utils.fsdp_utils", lambda module: fsdp2.install_accelerate(capture, module))
    when_imported("deepspeed", lambda module: deepspeed.install(capture, module))
    for name in ("zeroplan_runtime.api", "zeroplan_runtime.compat.deepspeed.entry"):
        when_imported(name, lambda module: runtime.install(capture, module))
    when_imported("zeroplan_runtime.integrations.lightning.checkpoints", runtime.install_lightning)
