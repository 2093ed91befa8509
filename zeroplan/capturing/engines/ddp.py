"""``torch.nn.parallel.DistributedDataParallel``.

Source: torch 2.11, ``torch/nn/parallel/distributed.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from zeroplan.capturing.engines.handed import Handed, watch_optimizers
from zeroplan.capturing.hooks.imports import changes

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

_BUCKET_MIB = 25


def install(capture: Capture) -> None:
    """Let the class itself keep the whole model and reduce nothing, so that what derives from it does the same."""
    kind: Any = torch.nn.parallel.DistributedDataParallel
    changes(kind)

    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0, broadcast_buffers: bool = True,
        init_sync: bool = True, process_group: Any = None, bucket_cap_mb: Any = None, find_unused_parameters: bool = False,
        check_reduction: bool = False, gradient_as_bucket_view: bool = False, static_graph: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        torch.nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device, self.dim = module, device_ids, output_device, dim
        self.device, self.device_type = torch.device("cuda", torch.cuda.current_device()), "cuda"
        self.broadcast_buffers, self.process_group, self.static_graph = broadcast_buffers, process_group, static_graph
        self.find_unused_parameters, self.gradient_as_bucket_view = find_unused_parameters, gradient_as_bucket_view
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.logger = None
        if gradient_as_bucket_view:
            capture.leave_out("gradient_as_bucket_view", "less", "gradients are views of the buckets; both are counted")
        if bucket_cap_mb not in (None, _BUCKET_MIB):
            capture.leave_out("bucket_cap_mb", "unknown", f"buckets of {bucket_cap_mb} MiB; those of {_BUCKET_MIB} are counted")
        if capture.job.world.size == 1:
            capture.leave_out("DDP", "more", "over one rank DDP makes its buckets, too, which are as large as all gradients")
        self.handed = Handed(capture, "ddp", module, {"stage": 0}, as_made=True)
        self.handed.ready()
        watch_optimizers(capture, self.handed)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def hook(self: Any, *_: Any, **__: Any) -> None:
        capture.leave_out("register_comm_hook", "unknown", "a hook of the script's reduces the buckets in a way of its own")

    def nothing(self: Any, *_: Any, **__: Any) -> None:
        return None

    kind.__init__, kind.forward, kind.no_sync, kind.register_comm_hook = init, forward, no_sync, hook
    kind._set_static_graph = kind._register_builtin_comm_hook = nothing
    kind._get_ddp_logging_data = lambda self: {}
