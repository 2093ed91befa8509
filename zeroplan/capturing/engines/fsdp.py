"""``FullyShardedDataParallel`` (FSDP 1), called by a script itself, by accelerate or by Lightning.

Source: torch 2.11, ``torch/distributed/fsdp/fully_sharded_data_parallel.py``, ``wrap.py``; accelerate 1.15, ``accelerator.py``
(``prepare_model``), which makes trained parameters of units fp32 under mixed precision.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroplan.capturing.engines.fsdp2 import Sharding
from zeroplan.capturing.hooks.imports import changes

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2}


@dataclass(slots=True)
class FlatSharding(Sharding):
    """Every ``FullyShardedDataParallel`` of one script."""

    engine: str = "fsdp"
    strategy: str = "FULL_SHARD"

    def _stage(self, root: nn.Module) -> int:
        if "HYBRID" in self.strategy:
            self._leave_out(
                "sharding_strategy", "more", "shards within a node and replicas between nodes are counted as shards of all"
            )
        return _STAGES[self.strategy]

    def _offload(self) -> dict[str, Any]:
        if any(getattr(call.offload, "offload_params", False) for call in self.calls):
            self._leave_out("cpu_offload", "less", "shards that are on the host are counted on the GPU")
        return {}

    def _units(self, root: nn.Module) -> dict[str, Any]:
        if all(root in call.modules for call in self.calls):
            return {"one_unit": True}
        found = super(FlatSharding, self)._units(root)
        if found:
            self._leave_out(
                "auto_wrap_policy", "unknown", "units beside the blocks; each block and the rest are counted as units"
            )
        frozen = any(not p.requires_grad for p in root.parameters()) and any(p.requires_grad for p in root.parameters())
        return {"mixed_units": True} if frozen else {}

    def _dtypes(self, policy: Any, dtypes: dict[bool, set[torch.dtype]]) -> dict[str, Any]:
        said = super(FlatSharding, self)._dtypes(policy, dtypes)
        reduced = said.pop("reduce_dtype", None)
        if "precision" not in said and reduced is None:
            self._leave_out("MixedPrecision", "unknown", "gradients are reduced in another dtype than that of the products")
        return said


def install(capture: Capture, module: Any) -> None:
    """Let the class itself keep the whole model, so that what derives from it does the same."""
    kind: Any = module.FullyShardedDataParallel
    changes(kind)
    sharding = FlatSharding(capture)

    def init(
        self: Any, module: Any, process_group: Any = None, sharding_strategy: Any = None, cpu_offload: Any = None,
        auto_wrap_policy: Any = None, backward_prefetch: Any = None, mixed_precision: Any = None, ignored_modules: Any = None,
        param_init_fn: Any = None, device_id: Any = None, sync_module_states: bool = False, forward_prefetch: bool = False,
        limit_all_gathers: bool = True, use_orig_params: bool = False, ignored_states: Any = None, device_mesh: Any = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = module
        self._is_root, self._use_orig_params = None, use_orig_params
        self.mixed_precision, self.sharding_strategy, self.process_group = mixed_precision, sharding_strategy, process_group
        if sharding_strategy is not None:
            sharding.strategy = sharding_strategy.name
        if ignored_modules or ignored_states:
            capture.leave_out("ignored_modules", "more", "parameters that are not sharded")
        if forward_prefetch:
            capture.leave_out("forward_prefetch", "more", "the next unit is gathered before it is needed in the forward")
        if _by_accelerate() and mixed_precision is not None and mixed_precision.param_dtype is not None:
            for param in module.parameters():
                if param.requires_grad and param.is_floating_point() and param.dtype != torch.float32:
                    param.data = param.data.float()
        for unit in [*_units_of(module, auto_wrap_policy), module]:
            sharding.call(unit, device_mesh, True, _policy(mixed_precision, root=unit is module), cpu_offload)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_wrapped_module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        sharding.delays = True
        yield

    @contextlib.contextmanager
    def quiet(*_: Any, **__: Any) -> Iterator[None]:
        yield

    def clip(self: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, param in nn.Module.named_parameters(self, *args, **kwargs):
            yield name.replace("_fsdp_wrapped_module.", ""), param

    kind.__init__, kind.forward, kind.no_sync, kind.clip_grad_norm_ = init, forward, no_sync, clip
    kind.named_parameters, kind._has_params = named, property(lambda _: False)
    kind.summon_full_params = staticmethod(quiet)
    kind.state_dict_type = staticmethod(quiet)
    kind.set_state_dict_type = staticmethod(lambda *_, **__: None)
    kind.fsdp_modules = staticmethod(lambda one, root_only=False: [m for m in one.modules() if isinstance(m, kind)])
    kind.optim_state_dict = staticmethod(lambda model, optim, *_, **__: optim.state_dict())
    kind.apply, kind._apply, kind.named_buffers = nn.Module.apply, nn.Module._apply, nn.Module.named_buffers


def _by_accelerate() -> bool:
    return sys._getframe(2).f_code.co_filename.endswith("accelerate/accelerator.py")


def _units_of(module: nn.Module, policy: Any) -> list[nn.Module]:
    """The modules within one that a wrap policy makes units."""
    from torch.distributed.fsdp.wrap import _Policy, _recursive_wrap

    if policy is None:
        return []
    if isinstance(policy, _Policy):
        return [one for one in policy._run_policy(module, set(), {}) if one is not module]
    found: list[nn.Module] = []

    def wrapped(one: nn.Module, **_: Any) -> nn.Module:
        found.append(one)
        return one

    take: Any = wrapped
    _recursive_wrap(
        module=module, auto_wrap_policy=policy, wrapper_cls=take, ignored_modules=set(), ignored_params=set(),
        only_wrap_children=True,
    )  # fmt: skip
    return found


@dataclass(frozen=True, slots=True)
class _Casts:
    """A ``MixedPrecision`` in the terms of ``fully_shard``'s policy."""

    param_dtype: Any
    reduce_dtype: Any
    cast_forward_inputs: bool
    output_dtype: Any = None


def _policy(mixed_precision: Any, *, root: bool) -> _Casts:
    if mixed_precision is None:
        return _Casts(None, None, cast_forward_inputs=False)
    casts = mixed_precision.cast_forward_inputs or (root and mixed_precision.cast_root_forward_inputs)
    return _Casts(mixed_precision.param_dtype, mixed_precision.reduce_dtype or mixed_precision.param_dtype, casts)
