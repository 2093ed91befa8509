"""``fully_shard`` (FSDP2), called by a script itself, by accelerate or by a framework.

Source: torch 2.11, ``torch/distributed/fsdp/_fully_shard``; accelerate 1.15, ``utils/fsdp_utils.py`` (``fsdp2_prepare_model``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zeroplan.capturing.engines.handed import Handed, dtype_name, watch_optimizers
from zeroplan.capturing.hooks.imports import changes
from zeroplan.capturing.places import device_of, gpu, on_gpu
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

#: Modules that hand the function on.
_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
_HALF = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Call:
    """One call: the modules that are one unit, and what was asked for them."""

    modules: list[nn.Module]
    reshard: Any
    policy: Any
    offload: Any
    mesh: Any
    dtypes: dict[bool, set[torch.dtype]]


@dataclass(slots=True)
class Sharding:
    """Every call of one script."""

    capture: Capture
    calls: list[_Call] = field(default_factory=list)
    handed: Handed | None = None
    since: int = 0  # the event of the first call
    engine: str = "fsdp2"
    delays: bool = False  # whether a micro batch goes by without reducing gradients

    def call(self, module: Any, mesh: Any, reshard: Any, policy: Any, offload: Any) -> None:
        """Note a call, and let its modules cast what they are given."""
        modules = list(module) if isinstance(module, (list, tuple)) else [module]
        for one in modules:
            for child in one.modules():
                if any(type(p).__name__ == "DTensor" for p in child._parameters.values()):
                    raise StoppedError("fully_shard of distributed tensors (tensor parallelism) is not understood", user_line())
        if not self.calls:
            self.since = len(self.capture.recorder.out.op)
        dtypes: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
        for one in modules:
            for p in one.parameters():
                if p.is_floating_point():
                    dtypes[p.requires_grad].add(p.dtype)
        self.calls.append(_Call(modules, reshard, policy, offload, mesh, dtypes))
        for one in modules:
            one.register_forward_pre_hook(self._entered(policy), with_kwargs=True, prepend=True)
            if getattr(policy, "output_dtype", None) is not None:
                one.register_forward_hook(_cast_output(policy.output_dtype))

    def _entered(self, policy: Any) -> Any:
        dtype = getattr(policy, "param_dtype", None)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.handed is None:
                self._hand_over()
            if dtype is None or not getattr(policy, "cast_forward_inputs", True):
                return None

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

            return tree_map_only(torch.Tensor, cast, args), tree_map_only(torch.Tensor, cast, kwargs)

        return hook

    def gather(self, module: nn.Module) -> None:
        """Let a unit's own parameters have the dtype in which they are gathered."""
        policy = next((call.policy for call in self.calls if module in call.modules), None)
        dtype = getattr(policy, "param_dtype", None)
        for param in module.parameters(recurse=False):
            if dtype is not None and param.is_floating_point() and param.dtype != dtype:
                param.data = torch.empty(param.shape, dtype=dtype, device=gpu())

    # ---- what the planner gets -----------------------------------------------------------------------------------------
    def _hand_over(self) -> None:
        root = self._root()
        dtypes = {kind: set().union(*(call.dtypes[kind] for call in self.calls)) for kind in (True, False)}
        policy = next((call.policy for call in reversed(self.calls) if root in call.modules), None)
        for module in root.modules():
            for param in module._parameters.values():
                if param is None:
                    continue
                dtype = getattr(policy, "param_dtype", None)
                wanted = dtype if dtype is not None and param.is_floating_point() else param.dtype
                if not on_gpu(param) or param.dtype != wanted:
                    param.data = torch.empty(param.shape, dtype=wanted, device=gpu())
            for name, buffer in module._buffers.items():
                if buffer is not None and not on_gpu(buffer):
                    made = device_of(buffer).type == "meta"
                    empty = torch.empty(buffer.shape, dtype=buffer.dtype, device=gpu()) if made else buffer.to(gpu())
                    module._buffers[name] = empty
        said: dict[str, Any] = {"stage": self._stage(root), **self._offload(), **self._units(root), **self._mesh()}
        said |= self._dtypes(policy, dtypes)
        self.handed = Handed(self.capture, self.engine, root, said, since=self.since)
        self.handed.ready()
        watch_optimizers(self.capture, self.handed)
        self.handed.notes.append(self._of_accumulation)

    def _root(self) -> nn.Module:
        """The module of the calls that holds all others.

        Raises:
            StoppedError: there is none.
        """
        every = [module for call in self.calls for module in call.modules]
        for one in reversed(every):
            inside = set(one.modules())
            if all(other in inside for other in every):
                return one
        raise StoppedError("fully_shard is called on modules that no one of them holds", user_line())

    def _stage(self, root: nn.Module) -> int:
        flags = [call.reshard for call in self.calls if root not in call.modules]
        if any(isinstance(one, int) and not isinstance(one, bool) for one in flags):
            self._leave_out(
                "reshard_after_forward", "more", "parameters are resharded to a smaller group; shards of all are counted"
            )
        units = {
            one is not False
            for call in self.calls
            if root not in call.modules
            for one in (call.reshard,)
            if len(call.modules) == 1
        }
        if len(units) > 1:
            self._leave_out("reshard_after_forward", "unknown", "some units are resharded after their forward and some are not")
        return 2 if units == {False} else 3

    def _offload(self) -> dict[str, Any]:
        offloads = any(type(call.offload).__name__ == "CPUOffloadPolicy" for call in self.calls)
        return {"offload_optimizer": "cpu", "offload_param": "cpu"} if offloads else {}

    def _units(self, root: nn.Module) -> dict[str, Any]:
        """Return whether units are accelerate's, or the model is one; those that are neither blocks nor such are said."""
        names = {id(module): name for name, module in root.named_modules()}
        blocks = {name for name, module in root.named_modules() if name.rpartition(".")[2].isdigit()}
        outer = {name for name in blocks if not any(name.startswith(f"{other}.") for other in blocks)}
        sharded = [sorted(names[id(module)] for module in call.modules) for call in self.calls if root not in call.modules]
        of_blocks = {unit[0] for unit in sharded if len(unit) == 1 and unit[0] in outer}
        others = [unit for unit in sharded if not (len(unit) == 1 and unit[0] in outer)]
        lists = {name.rpartition(".")[0] for name in of_blocks}
        expected = {name for name in outer if name.rpartition(".")[0] in lists}
        if not others and of_blocks == expected and of_blocks:
            return {}
        if others and of_blocks == expected and of_blocks and any(len(unit) > 1 for unit in others) and len(others) <= 2:
            return {"accelerate_units": True}
        if not sharded:
            return {"one_unit": True}
        said = ", ".join("+".join(unit) for unit in (others or sharded))[:80]
        self._leave_out(
            "fully_shard", "unknown", f"units beside the blocks ({said}); each block and the rest are counted as units"
        )
        return {}

    def _mesh(self) -> dict[str, Any]:
        mesh = next((call.mesh for call in self.calls if call.mesh is not None), None)
        shape = tuple(getattr(mesh, "shape", ()))
        return {"dp_replicate": int(shape[0])} if len(shape) == 2 and shape[0] > 1 else {}

    def _dtypes(self, policy: Any, dtypes: dict[bool, set[torch.dtype]]) -> dict[str, Any]:
        param, reduce = getattr(policy, "param_dtype", None), getattr(policy, "reduce_dtype", None)
        trained, frozen = dtypes[True], dtypes[False] - dtypes[True]
        if len(trained) != 1:
            self._leave_out("dtypes", "unknown", "trained parameters of several dtypes")
        kept = next(iter(trained), torch.float32)
        if kept in _HALF:
            if param is not None and param != kept:
                self._leave_out("MixedPrecisionPolicy", "unknown", "16-bit parameters that are gathered in another dtype")
            return {"dtype": dtype_name(kept), "precision": "pure"}
        if param is None:
            return {"dtype": "fp32", "precision": "fp32"}
        said: dict[str, Any] = {"dtype": dtype_name(param)}
        if any(one in _HALF for one in frozen):
            said["precision"] = "half-autocast"
        if reduce is None or reduce == param:
            said["reduce_dtype"] = dtype_name(param)
        return said

    def _of_accumulation(self) -> None:
        assert self.handed is not None
        batches = self.handed.batches
        if batches.accumulates > 1 and not self.delays:
            self.handed.options["sync_each"] = True
        autocast = batches.slices[-1].autocast if batches.slices else None
        if autocast is not None and self.handed.options.get("dtype") == "fp32":
            self._leave_out("autocast", "unknown", "autocast over shards that are gathered in fp32")

    def _leave_out(self, key: str, effect: str, says: str) -> None:
        self.capture.leave_out(key, effect, says)


def _cast_output(dtype: torch.dtype) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, output)

    return hook


def _as_distributed(modules: Any) -> None:
    """Let parameters answer what scripts ask of a sharded one: they are whole."""
    from torch.distributed.tensor import Shard

    plain: Any = torch.Tensor
    if not hasattr(plain, "full_tensor"):
        plain.full_tensor = plain.to_local = lambda self, *_, **__: self
    for one in modules if isinstance(modules, (list, tuple)) else [modules]:
        for param in one.parameters():
            param.placements = (Shard(0),)


def install(capture: Capture, module: Any) -> None:
    """Replace ``fully_shard`` in the file that defines it."""
    sharding = Sharding(capture)
    base = module.FSDPModule
    homes = (module, *(sys.modules[name] for name in _HOMES if name in sys.modules))
    changes(base, torch.Tensor, *homes)

    class Handle:
        """Nothing to wait for."""

        def wait(self) -> None:
            """Return."""

    def quiet(self: Any, *_: Any, **__: Any) -> None:
        return None

    def unshard(self: Any, async_op: bool = False) -> Any:
        sharding.gather(self)
        return Handle() if async_op else None

    def sync(self: Any, requires_gradient_sync: bool, *_: Any, **__: Any) -> None:
        sharding.delays |= not requires_gradient_sync

    def plain_apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(base, self)._apply(*args, **kwargs)

    for name in vars(base):
        if name.startswith(("set_", "reshard", "reset_", "_set_")):
            setattr(base, name, quiet)
    base.set_requires_gradient_sync, base.unshard, base._apply = sync, unshard, plain_apply
    known: dict[type, type] = {}

    def fully_shard(
        one: Any, *, mesh: Any = None, reshard_after_forward: Any = None, shard_placement_fn: Any = None, mp_policy: Any = None,
        offload_policy: Any = None, ignored_params: Any = None, **_: Any,
    ) -> Any:  # fmt: skip
        if shard_placement_fn is not None:
            capture.leave_out("shard_placement_fn", "unknown", "shards of other dimensions than the first")
        if ignored_params:
            capture.leave_out("ignored_params", "more", "parameters that are not sharded")
        sharding.call(one, mesh, reshard_after_forward, mp_policy, offload_policy)
        _as_distributed(one)
        for each in one if isinstance(one, (list, tuple)) else [one]:
            kind = type(each)
            if not issubclass(kind, base):
                if kind not in known:
                    known[kind] = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
                each.__class__ = known[kind]
        return one

    fully_shard.state = lambda _: None  # type: ignore[attr-defined]
    for home in homes:
        home.fully_shard = fully_shard


def install_accelerate(capture: Capture, module: Any) -> None:
    """Let accelerate hand out weights that nobody has."""

    def loaded(accelerator: Any, model: Any, full_sd: Any, cpu_offload: bool = False) -> None:
        return None

    module.fsdp2_load_full_state_dict = loaded
    own_save = ("save_fsdp_model", "save_fsdp_optimizer")

    def saves(plugin: Any, *_: Any, **__: Any) -> None:
        from zeroplan.capturing.spans import SAVE

        capture.spans.enter(SAVE)
        kind = getattr(plugin.state_dict_type, "name", "")
        capture.engine_notes["saves"] = "full" if kind == "FULL_STATE_DICT" else "sharded"

    homes = [sys.modules[name] for name in ("accelerate.utils", "accelerate.accelerator") if name in sys.modules]
    changes(*homes)
    for home in (module, *homes):  # these took the names before, where a script has a block
        for name in own_save:
            if hasattr(home, name):
                setattr(home, name, saves)
