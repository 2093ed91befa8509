"""Records when the forward and the backward enter and leave each module, and when a gradient is complete.

Note [Backward positions]
    The backward runs graph nodes, not modules. Where nothing is attached to the graph, the module follows from the node
    (:class:`zeroplan.trace.recorder.CallTree`). ZeRO stage 3 attaches identity nodes: a module's backward begins when the
    gradient of its output arrives, and ends when the gradients of all its positional tensor inputs are computed
    (``deepspeed/runtime/zero/parameter_offload.py``). A module with keyword arguments only has no end, there as here. The
    nodes allocate nothing but change when some storages are freed, so `zero3` attaches the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zeroplan.tape.expanded import Op
from zeroplan.trace.recorder import CallTree, StorageRecorder
from zeroplan.trace.tiled import held_back


class ModuleHooks:
    """Hooks on every module and trainable parameter of `model` that record events; :meth:`detach` removes them."""

    def __init__(
        self,
        model: nn.Module,
        recorder: StorageRecorder,
        *,
        zero3: bool = False,
        local: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        """Attach the hooks, but to modules whose ids are `left_out`; `local` returns this rank's part of a gradient."""
        self._local = local
        self.recorder = recorder
        self.modules = list(model.named_modules())
        self.params = list(model.named_parameters())
        self._awaited = [0] * len(self.modules)
        self._pending = [0] * len(self.modules)
        self._handles: list[Any] = []
        self._begun: list[tuple[int, int]] = []
        recorder.calls = None if zero3 else CallTree()
        for index, (_, module) in enumerate(self.modules):
            if id(module) not in left_out:
                self._attach(index, module, zero3)
        for index, (_, param) in enumerate(self.params):
            if param.requires_grad:
                handle = param.register_post_accumulate_grad_hook(self._gradient(index))
                self._handles.append(handle)

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()

    def _gradient(self, index: int) -> Any:
        def hook(param: torch.Tensor) -> None:
            if held_back(param):
                return
            assert param.grad is not None
            self.recorder.gradient(index, self._local(param.grad))
            param.grad = None

        return hook

    def _attach(self, index: int, module: nn.Module, zero3: bool) -> None:
        recorder, out = self.recorder, self.recorder.out
        begin, end = self._identities(index) if zero3 else (None, None)

        def before(_: nn.Module, args: Any) -> Any:
            out.add(Op.ENTER, index)
            recorder.modules.append(index)
            if end is None:
                self._begun.append((index, torch._C._autograd._get_sequence_nr()))
                return None
            self._awaited[index] = 0
            return tree_map_only(torch.Tensor, end.apply, args) if torch.is_grad_enabled() else None

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            began = self._end_call(index)
            if output is None and sys.exc_info()[0] is not None:  # recomputation stops early by an exception
                while recorder.modules and recorder.modules.pop() != index:
                    pass
                return None
            if recorder.calls is not None and began >= 0:
                recorder.calls.add(began, torch._C._autograd._get_sequence_nr(), index)
            out.add(Op.EXIT, index)
            if recorder.modules and recorder.modules[-1] == index:
                recorder.modules.pop()
            if begin is None:
                return None
            return tree_map_only(torch.Tensor, begin.apply, output) if torch.is_grad_enabled() else None

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _end_call(self, index: int) -> int:
        """The sequence number at which the innermost call of the module began, -1 if none is open."""
        while self._begun:
            module, began = self._begun.pop()
            if module == index:
                return began
        return -1

    def _identities(self, index: int) -> tuple[Any, Any]:
        follower, recorder = self, self.recorder

        class BackwardBegin(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
                follower._pending[index] += 1
                return tensor.detach()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                if follower._pending[index] > 0:
                    follower._pending[index] -= 1
                    recorder.out.add(Op.BWD_ENTER, index)
                    recorder.modules.append(index)
                return grad

        class BackwardEnd(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
                if tensor.requires_grad:
                    follower._awaited[index] += 1
                return tensor.detach()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                follower._awaited[index] -= 1
                if follower._awaited[index] == 0:
                    recorder.out.add(Op.BWD_EXIT, index)
                    while index in recorder.modules and recorder.modules.pop() != index:
                        pass
                return grad

        return BackwardBegin, BackwardEnd
