"""Guards parameters whose memory does not hold their values: a read waits for the update or all-gather, or is refused.

Note [Guarded parameters]
    Between two forwards, and at stage 3 outside their unit's forward and backward, parameters may hold old values (an update
    or an all-gather is under way) or the values of another unit that shares the slot. Meanwhile a parameter's class is a
    subclass of ``nn.Parameter`` whose ``__torch_function__`` sees each use. For its unit's computations it is an
    ``nn.Parameter`` again, so these are not slowed down. The cost is to set ``__class__`` twice a micro batch and parameter
    (three times at stage 3), about 30 ns each.

    Aliases of a guarded parameter (``param.data``, ``param.detach()``, ``param[0]``) are guarded with it from then on. While
    a parameter is not guarded, those by ``data`` and ``detach()`` still are: its class is then another subclass, which
    overrides these two and no more. Others are not. So parameters stay guarded in the first micro batch, and in all that are
    audited; where an alias from there still exists at the step, later steps wait until all parameters are current, and stage
    3, where their memory holds others, refuses it. :mod:`zeroplan_runtime.parameter_aliases` finds those of later forwards.

    A DTensor is guarded likewise, and its methods that torch does not dispatch (``to_local()``) by its local tensor, which they
    all take. While it is not guarded its class is DTensor's own.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from zeroplan.core.errors import BadInput
from zeroplan_runtime.function_transforms import is_wrapped
from zeroplan_runtime.local_tensors import local_of
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.unit_state import UnitState


class Owner(Protocol):
    """The calls that the guard makes to the engine."""

    @property
    def hides_grads(self) -> bool:
        """Whether there are gradients in flat buffers, which no parameter's ``grad`` shows."""

    def before_read(self, unit: UnitState, name: str) -> None:
        """Makes the current stream wait until the parameter `name` of `unit` can be read.

        Raises:
            BadInput: when it cannot be read now.
        """

    def before_export(self, unit: UnitState, name: str) -> None:
        """Notes that memory of the parameter `name` is handed out, where writes are not seen.

        Raises:
            BadInput: when they would be lost.
        """

    def keeps_values(self, unit: UnitState) -> bool:
        """Returns whether `unit`'s parameters will have the same values in the backward of what is computed from them now."""


def not_gathered(name: str, unit: UnitState, *, in_backward: bool) -> BadInput:
    """The error for a read of parameter `name` at stage 3 while its unit is sharded."""
    remedy = (
        "its backward is seen by the gradients of its outputs: return tensors, or tuples, lists, dicts or dataclasses of them"
        if in_backward
        else f"read it within engine.gathered({unit.name!r}) on every rank; if a forward does, give initialize() a policy that "
        "takes a module whose forward contains every use of it"
    )
    return BadInput(f"parameter {name!r} is read while its unit {unit.name!r} is not gathered", where="stage 3", remedy=remedy)


class ParameterGuard:
    """Guards the parameters of `units` for `owner`; they are not guarded at first."""

    def __init__(self, units: Iterable[UnitState], owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self._params: dict[UnitState, list[nn.Parameter]] = {}
        for unit in units:
            self._params[unit] = [placed.param for placed in unit.placed()]
            for placed in unit.placed():
                _guarded[placed.param] = (weakref.ref(self), unit.index, placed.name)
        self._units = list(self._params)
        #: Aliases that are guarded, and tensors whose memory an array of numpy's shares, with the parameters' names.
        self.aliases: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        self.arrays: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        self._watched: list[tuple[weakref.ref[torch.Tensor], str]] | None = None

    def open(self, unit: UnitState) -> None:
        """Stops guarding `unit`'s parameters."""
        if unit.guarded:
            unit.guarded = False
            for param in self._params[unit]:
                param.__class__ = _open_class(type(param))

    def close(self, unit: UnitState) -> None:
        """Starts guarding `unit`'s parameters."""
        if not unit.guarded:
            unit.guarded = True
            for param in self._params[unit]:
                param.__class__ = _guarded_class(type(param))

    def open_all(self) -> None:
        """Stops guarding all parameters."""
        for unit in self._units:
            self.open(unit)

    def close_all(self) -> None:
        """Starts guarding all parameters."""
        for unit in self._units:
            self.close(unit)

    def watch(self) -> None:
        """Begins to note the aliases that are taken, or goes on."""
        self._watched = self._watched or []

    def end_watch(self) -> str:
        """Ends :meth:`watch`. Call it once the graphs are freed, because they save aliases as well.

        Returns:
            The parameter of an alias that was taken meanwhile and still exists; empty if there is none.
        """
        watched, self._watched = self._watched or (), None
        return next((name for alias, name in watched if alias() is not None), "")

    def guard_alias(self, alias: torch.Tensor, index: int, name: str) -> None:
        """Guards `alias` of the parameter `name` of unit number `index` with it, and notes it if aliases are watched."""
        alias.__class__ = _guarded_class(type(alias))
        _guarded[alias] = (weakref.ref(self), index, name)
        self.aliases[alias] = name
        if self._watched is not None:
            self._watched.append((weakref.ref(alias), name))

    def guard_values(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Guards `values` with `param`, if they are in its memory."""
        if values.numel() and values.data_ptr() == local_of(param).data_ptr():
            self.guard_alias(values, *_guarded[param][1:])

    def guard_outputs(self, unit: UnitState, output: Any) -> None:
        """Guards the tensors in `output`, of the forward of `unit`, that are aliases of a parameter in the unit's slot."""
        begin = unit.param_slot.tensor.data_ptr()
        end = begin + unit.param_slot.tensor.nbytes
        for tensor in tensors_of(output):
            if type(tensor) is torch.Tensor and has_memory(tensor) and begin <= tensor.data_ptr() < end:
                self.guard_alias(tensor, unit.index, unit.owner_of(tensor)[1])

    def remove(self) -> None:
        """Stops guarding all parameters for good."""
        for unit, params in self._params.items():
            unit.guarded = False
            for param in params:
                param.__class__ = plain_class(type(param))
                _guarded.pop(param, None)

    def before_use(self, index: int, name: str) -> None:
        """Lets the owner wait or refuse, before a guarded parameter or an alias of one is read or written."""
        unit, owner = self._units[index], self._owner()
        if unit.guarded and owner is not None:
            owner.before_read(unit, name)

    def after_use(self, index: int, name: str, result: Any) -> None:
        """Refuses a result of a guarded parameter whose backward would read other values.

        Raises:
            BadInput: when `result` has a graph and the owner does not keep the values.
        """
        unit, owner = self._units[index], self._owner()
        if not unit.guarded or owner is None or owner.keeps_values(unit):
            return
        if any(made.requires_grad and made.grad_fn is not None for made in tensors_of(result)):
            raise BadInput(
                f"a graph would use {name!r} outside its unit's forward, and its values are gone in the backward",
                where="stage 3",
                remedy="compute it in the unit's forward, under torch.no_grad(), or at stage 2",
            )

    def before_export(self, index: int, name: str) -> None:
        """Tells the owner before a parameter, or an alias of one, is handed out as an array of numpy's or by dlpack."""
        owner = self._owner()
        if owner is not None:
            owner.before_export(self._units[index], name)

    def before_grad(self, name: str) -> None:
        """Refuses reading or setting ``grad`` of a guarded parameter while gradients are in flat buffers.

        Raises:
            BadInput: with the engine's methods for it.
        """
        owner = self._owner()
        if owner is not None and owner.hides_grads:
            raise BadInput(
                f"{name}.grad is not there: gradients are in flat buffers, averaged over the ranks and maybe sharded",
                where="model",
                remedy="to clip, set gradient_clipping; for their norm, engine.get_global_grad_norm(); to drop them, "
                "engine.zero_grad()",
            )


#: Guarded parameters and aliases of them: who guards them, the index of their unit, their name.
_guarded: MutableMapping[torch.Tensor, tuple[Callable[[], Any], int, str]] = WeakIdKeyDictionary()
#: By class: the guarded one, and back; the one of parameters that are not guarded now, and back.
_guarded_classes: dict[type, type] = {}
_plain_classes: dict[type, type] = {}
_open_classes: dict[type, type] = {}
_opened_classes: dict[type, type] = {}


def plain_class(kind: type) -> type:
    """The class, which users know, of a parameter that is of class `kind` now."""
    return _plain_classes.get(kind) or _opened_classes.get(kind, kind)


def _guarded_class(kind: type) -> type:
    if kind in _plain_classes:
        return kind
    kind = plain_class(kind)
    made = _guarded_classes.get(kind)
    if made is None:
        members: dict[str, Any] = {"__torch_function__": classmethod(_on_use)}
        if issubclass(kind, DTensor):
            members["_local_tensor"] = property(_taken_local)
        made = _guarded_classes[kind] = _subclass(kind, members)
        _plain_classes[made] = kind
    return made


def _open_class(kind: type) -> type:
    kind = plain_class(kind)
    if issubclass(kind, DTensor):  # torch's dispatch knows the class itself by sight
        return kind
    made = _open_classes.get(kind)
    if made is None:
        data = property(_taken_data, torch.Tensor.data.__set__)  # type: ignore[attr-defined]
        members = {"data": data, "detach": _taken_alias, **{name: _exporting(name) for name in _EXPORTING}}
        made = _open_classes[kind] = _subclass(kind, members)
        _opened_classes[made] = kind
    return made


def _subclass(kind: type, members: dict[str, Any]) -> type:
    members |= {"__module__": kind.__module__, **{name: _as_plain(name) for name in ("__reduce_ex__", "__deepcopy__")}}
    return type(kind)(kind.__name__, (kind,), members)


def _taken_local(param: torch.Tensor) -> torch.Tensor:
    """The local tensor of a guarded DTensor, which its own methods take as well."""
    _before_use(param)
    return local_of(param)


def _taken_data(param: torch.Tensor) -> torch.Tensor:
    """``param.data`` of a parameter that is not guarded now; it shares autograd's version counter, which tells of writes."""
    if sys._getframe(1).f_globals["__name__"].startswith("torch._"):  # AOTAutograd takes no other class than torch.Tensor
        return torch.Tensor.detach(param)
    return _taken_alias(param)


def _taken_alias(param: torch.Tensor) -> torch.Tensor:
    """``param.detach()`` of a parameter that is not guarded now."""
    alias = torch.Tensor.detach(param)
    entry = _entry(param)
    if entry is not None and alias.numel():
        entry[0].guard_alias(alias, *entry[1:])
    return alias


def _before_export(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if (entry := _entry(tensor)) is not None:
            entry[0].before_export(*entry[1:])


def _exporting(name: str) -> Callable[..., Any]:
    """Wraps a method that hands out the memory of a parameter that is not guarded now."""
    method = getattr(torch.Tensor, name)

    def call(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _before_export((param,))
        return method(param, *args, **kwargs)

    return call


def _as_plain(name: str) -> Callable[..., Any]:
    """Wraps a method whose result has the object's class, so that it makes an object of the plain class."""

    def call(tensor: torch.Tensor, *args: Any) -> Any:
        kind = type(tensor)
        _before_use(tensor)
        tensor.__class__ = plain_class(kind)
        try:
            return getattr(tensor, name)(*args)
        finally:
            tensor.__class__ = kind

    return call


def _on_use(
    _cls: type, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Returns the ``__torch_function__`` of guarded parameters and of what shares their memory."""
    kwargs = kwargs or {}
    used: list[tuple[torch.Tensor, Any]] = []
    if func in _GRAD:
        _before_grad(args[0])
    elif func not in _METADATA and not (func in _CASTS and _casts_nothing(func, args, kwargs)):
        found = [tensor for tensor in tensors_of((args, kwargs)) if type(tensor) in _plain_classes]
        used = [(tensor, _entry(tensor) if func in _ALIASES else _before_use(tensor)) for tensor in found]
        if func in _EXPORTS:
            _before_export(found)
    if any(_has_own_function(kind) for kind in types):
        result = _as_others_know_it(func, args, kwargs)
    else:
        with torch._C.DisableTorchFunctionSubclass():
            result = (torch.Tensor.detach if func == _DATA_GET else func)(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        for tensor, entry in used:
            if entry is not None:
                entry[0].after_use(*entry[1:], result)
                _guard_aliases(result, tensor, entry)
    return result


def _as_others_know_it(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls `func` with guarded tensors in their plain classes: another subclass, which handles it, knows no guarded one."""
    kinds = [(tensor, type(tensor)) for tensor in tensors_of((args, kwargs)) if type(tensor) in _plain_classes]
    try:
        for tensor, kind in kinds:
            tensor.__class__ = plain_class(kind)
        return func(*args, **kwargs)
    finally:
        for tensor, kind in kinds:
            tensor.__class__ = kind


def _has_own_function(kind: Any) -> bool:
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return kind not in _plain_classes and function not in _TORCHS_OWN


def _gone() -> None:
    """Stands for a dead weak reference."""


def _entry(tensor: torch.Tensor) -> Any:
    """The guard of `tensor`, the index of its unit and its name; None if it is not guarded."""
    reference, index, name = _guarded.get(tensor, (_gone, 0, ""))
    guard = reference()
    if guard is None:  # a copy that took over the class, or the engine is gone
        tensor.__class__ = plain_class(type(tensor))
        return None
    return guard, index, name


def _before_use(tensor: torch.Tensor) -> Any:
    entry = _entry(tensor)
    if entry is not None:
        entry[0].before_use(*entry[1:])
    return entry


def _before_grad(tensor: torch.Tensor) -> None:
    entry = _entry(tensor)
    if entry is not None:
        entry[0].before_grad(entry[2])


def _guard_aliases(result: Any, tensor: torch.Tensor, entry: Any) -> None:
    """Guards the tensors in `result` that share the memory of `tensor`."""
    for made in tensors_of(result):
        is_plain = type(made) is torch.Tensor and has_memory(made) and made.numel()
        if is_plain and made.untyped_storage().data_ptr() == local_of(tensor).untyped_storage().data_ptr():
            entry[0].guard_alias(made, *entry[1:])
    if type(result).__module__ == "numpy" and isinstance(base := getattr(result, "base", None), torch.Tensor):
        entry[0].arrays[base] = entry[2]


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether `tensor` has memory with strides; those of vmap and jvp stand for others."""
    return tensor.layout is torch.strided and not is_wrapped(tensor)


def _casts_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        empty = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
        return func(empty, *args[1:], **kwargs) is empty


def _functions(names: str) -> frozenset[Any]:
    """Returns the methods, functions, and attribute getters and setters of these names in ``torch.Tensor`` and ``torch``."""
    found: set[Any] = set()
    for name in names.split():
        for owner in (torch.Tensor, torch):
            one = getattr(owner, name, None)
            if one is not None:
                found.update([one.__get__, one.__set__, one.__delete__] if inspect.isgetsetdescriptor(one) else [one])
    return frozenset(found)


_TORCHS_OWN = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]
_DATA_GET = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_GRAD = _functions("grad")
#: Functions that return an alias and read no element.
_ALIASES = frozenset({_DATA_GET, torch.Tensor.detach, torch.detach})
#: Methods whose result shares the memory and tells of no write.
_EXPORTING = ("numpy", "__array__", "__dlpack__")
_EXPORTS = _functions(" ".join(_EXPORTING))
_CASTS = _functions("to cpu cuda float half double bfloat16")
#: Functions that read and write no element.
_METADATA = _functions(
    "shape dtype device layout ndim names name requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_nested itemsize nbytes output_nr retains_grad _version _base _cdata _backward_hooks _post_accumulate_grad_hooks "
    "size dim ndimension numel nelement stride storage_offset element_size is_contiguous is_floating_point is_complex "
    "is_signed is_inference is_pinned is_shared get_device data_ptr untyped_storage is_same_size is_set_to has_names "
    "register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad __len__ __hash__ is_tensor "
    "_has_compatible_shallow_copy_type empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros "
    "new_ones new_full new_tensor result_type"
) | {torch.Tensor.data.__set__, torch.autograd.grad}  # type: ignore[attr-defined]
