"""Compiled blocks of a model: each is traced into a graph, lowered as for a GPU, and run on the meta device as its code says.

Note [Regions]
    ``block.compile()`` makes one graph of a block's forward and one of its backward. What dynamo would capture is what
    AOTAutograd traces here by itself: a block of a transformers model has no break in it. Blocks that differ in their weights
    alone share one graph, as they share one piece of code on a GPU. Gradient checkpointing lies around the compiled block, as
    transformers' layers have it, and the recomputation runs the compiled forward again; or within, as in torchtitan: then the
    backward graph recomputes, and only what it reads.

Note [A model whose units have hooks]
    ``torch.compile`` of a whole model that FSDP2 has sharded breaks at every unit, as its hooks are closed to dynamo. The break
    lies in the loop over the blocks, so the base model's forward runs as written, and what it calls is compiled by itself: each
    block, and other modules of the model's own, such as the last norm; torch's modules are not. Then the head and the loss
    follow in one graph, which also returns the logits. Where gradient checkpointing wraps the blocks, dynamo stays away from
    it, and they run as written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from zeroplan.tape.expanded import TapeModule, blocks_of
from zeroplan.trace import attention

#: Attributes of modules that number them, and change nothing that they compute without a cache.
_NUMBERS = frozenset({"layer_idx", "layer_index", "layer_id"})


class CompiledRegions:
    """The compiled parts of a model. Within the context their forwards run compiled.

    Attributes:
        inner: the ids of the modules within regions, which are not called any more.
    """

    def __init__(self, model: nn.Module, *, every: int = 0, between: bool = False, checkpoints: bool = False) -> None:
        """Compile the blocks; each `every`-th checkpoints within its graph, none with 0. With `between`, what lies between them
        is compiled as well, and they are not where they are checkpointed. See Note [A model whose units have hooks].
        """
        self._every = every
        self._shared: dict[Any, Callable[..., Any]] = {}
        modules = list(model.named_modules())
        index = {name: i for i, (name, _) in enumerate(modules)}
        rows = [TapeModule(n, type(m).__name__, index[n.rpartition(".")[0]] if n else -1) for n, m in modules]
        self._blocks = [modules[i][1] for i in blocks_of(rows)]
        self._rest: _Rest | None = None
        self._undo = contextlib.ExitStack()
        after: list[nn.Module] = []
        if between:
            blocks, self._blocks = self._blocks, [] if checkpoints else self._blocks
            name = str(getattr(model, "base_model_prefix", ""))
            if isinstance(base := getattr(model, name, None), nn.Module):
                self._blocks += [one for one in base.children() if _is_own(one) and not any(b in one.modules() for b in blocks)]
                self._rest = _Rest(model, name)
                after = [one for one in model.modules() if one is not model and one not in base.modules()]
        inner = [*after, *(m for block in self._blocks for m in block.modules())]
        self.inner = frozenset(map(id, inner)) - {id(b) for b in self._blocks}

    def __enter__(self) -> CompiledRegions:
        for number, block in enumerate(self._blocks, 1):
            recomputes = self._every > 0 and number % self._every == 0
            block.forward = _CompiledBlock(block, self._shared, recomputes=recomputes)
        if self._rest is not None:
            self._rest.attach(_CompiledBlock(self._rest, self._shared, recomputes=False))
            self._undo.enter_context(_masks_of_a_graph())
        return self

    def __exit__(self, *exc: object) -> None:
        for block in self._blocks:
            del block.forward
        if self._rest is not None:
            self._rest.detach()
        self._undo.close()


@contextlib.contextmanager
def _masks_of_a_graph() -> Iterator[None]:
    """While it lasts, transformers makes attention's masks as it does in a graph: without looking at positions' values, so that
    it cannot leave the causal mask to the kernel (``masking_utils.find_packed_sequence_indices``).
    """
    from transformers import masking_utils

    with mock.patch.object(masking_utils, "is_tracing", return_value=True):
        yield


def _is_own(module: nn.Module) -> bool:
    """Return whether dynamo compiles a call of this module by itself: its code is no part of torch, and it has parameters."""
    return not type(module).__module__.startswith("torch.") and any(True for _ in module.parameters())


class _ReachedError(Exception):
    """The base model was called; its arguments."""


class _Base(nn.Module):
    """Stands in the base model's place: hands back what that has returned, or reaches it for the first time."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self._found = found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the base model has returned. Raises _ReachedError: where it has not run yet."""
        if self._found is None:
            raise _ReachedError(args, kwargs)
        return self._found


class _Rest(nn.Module):
    """What a model computes after its base model: the head and the loss. Its parameters are those outside the base model."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        object.__setattr__(self, "_whole", model)  # no submodule: most of its parameters are the base model's
        self._name, self._run = name, model.forward
        self._places: list[tuple[nn.Module, str]] = []
        for number, (owner, leaf, parameter) in enumerate(_parameters_outside(model, name)):
            self.register_parameter(f"own_{number}", parameter)
            self._places.append((owner, leaf))

    def attach(self, compiled: Callable[..., Any]) -> None:
        """Let the model run its base model, and then `compiled` with what that returns and the model's own arguments."""
        model: Any = self._whole
        base = model._modules[self._name]

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                self._with_base(None, args, kwargs)
            except _ReachedError as reached:
                given, named = reached.args
            else:
                raise ValueError(f"{type(model).__name__} does not call its {self._name}")
            return compiled(base(*given, **named), *args, **kwargs)

        model.forward = forward

    def detach(self) -> None:
        """Give the model its forward again."""
        model: Any = self._whole
        del model.forward

    def forward(self, found: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's output, where its base model has returned `found`."""
        before = [(owner, leaf, owner._parameters[leaf]) for owner, leaf in self._places]
        for number, (owner, leaf, _) in enumerate(before):
            owner._parameters[leaf] = getattr(self, f"own_{number}")
        try:
            return self._with_base(found, args, kwargs)
        finally:
            for owner, leaf, parameter in before:
                owner._parameters[leaf] = parameter

    def _with_base(self, found: Any, args: Any, kwargs: Any) -> Any:
        whole: Any = self._whole
        modules: dict[str, Any] = whole._modules
        base = modules[self._name]
        modules[self._name] = _Base(found)
        try:
            return self._run(*args, **kwargs)
        finally:
            modules[self._name] = base


def _parameters_outside(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters that modules outside the submodule `name` have, shared ones as well: the owner, and its name there."""
    for path, module in model.named_modules():
        if path == name or path.startswith(f"{name}."):
            continue
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, leaf, parameter


class _CompiledBlock:
    """The forward of one compiled module."""

    def __init__(self, module: nn.Module, shared: dict[Any, Callable[..., Any]], *, recomputes: bool) -> None:
        self._module, self._shared, self._recomputes = module, shared, recomputes
        self._forward = module.forward
        self._kind = _kind_of(module)
        self._state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        constants = [None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
        tensors = [leaves[i] for i in places]
        facts = [(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors]
        key = (self._kind, str(spec), str(constants), str(facts), torch.is_grad_enabled(), self._recomputes)
        if key not in self._shared:
            self._shared[key] = self._compiled(leaves, places, spec, tensors)
        return self._shared[key](list(self._state.values()), tensors)

    def _compiled(self, leaves: list[Any], places: list[int], spec: Any, tensors: list[torch.Tensor]) -> Callable[..., Any]:
        """Trace and lower the module; returns its function of its state, and of the tensors among its arguments."""
        from torch._functorch.aot_autograd import aot_function
        from torch._guards import TracingContext, tracing
        from torch._inductor.decomposition import select_decomp_table
        from torch._subclasses.fake_tensor import FakeTensorMode

        from zeroplan.trace import inductor

        module, forward, names = self._module, self._forward, list(self._state)
        constants = [None if i in places else leaf for i, leaf in enumerate(leaves)]  # the graph outlives its first arguments

        def body(state: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
            whole = list(constants)
            for place, tensor in zip(places, tensors, strict=True):
                whole[place] = tensor
            args, kwargs = pytree.tree_unflatten(whole, spec)
            with _reparametrize_module(module, dict(zip(names, state, strict=True))):
                return forward(*args, **kwargs)

        compiled = aot_function(
            body,
            fw_compiler=lambda graph, inputs: inductor.lower(graph, inputs),
            bw_compiler=lambda graph, inputs: inductor.lower(graph, inputs, backward=True),
            inference_compiler=lambda graph, inputs: inductor.lower(graph, inputs, inference=True),
            partition_fn=partial(inductor.partition, recomputes=self._recomputes),
            decompositions=select_decomp_table(),
            num_params_buffers=len(names),
        )

        known: dict[int, torch.Tensor] = {}
        unhooked = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)  # no checkpoint's
        fakes = FakeTensorMode()
        with _disable_current_modes(), tracing(TracingContext(fakes)), _attention_in_graph(), _float8_in_graph(), unhooked:
            compiled(*([_stand_in(t, known, fakes) for t in part] for part in (self._state.values(), tensors)))
        return compiled


@contextlib.contextmanager
def _attention_in_graph() -> Iterator[None]:
    """While a graph is traced, attention is one operator of it."""
    from zeroplan.trace.compiled_attention import OpaqueAttention

    def opaque(kernel: str, *operands: Any) -> torch.Tensor:
        found: torch.Tensor = OpaqueAttention.apply(kernel, *operands, *[None] * (4 - len(operands)))
        return found

    attention.in_graph = opaque
    try:
        yield
    finally:
        attention.in_graph = None


def _float8_in_graph() -> contextlib.AbstractContextManager[object]:
    """While a graph is traced, 8-bit products are those of a GPU."""
    from zeroplan_runtime.techniques import float8

    return mock.patch.object(float8, "is_traced", return_value=True)


def _stand_in(tensor: torch.Tensor, known: dict[int, torch.Tensor], fakes: Any) -> torch.Tensor:
    """A fake tensor like this one, the same for the same.

    It is of a CPU: on the meta device composite operators, such as ``nll_loss``, have kernels of their own, below autograd, and
    a graph traced there would lack their gradients.
    """
    if id(tensor) not in known:
        with fakes:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        known[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    return known[id(tensor)]


def _kind_of(module: nn.Module) -> str:
    """All that decides a module's graph: classes, shapes and settings of the modules in it, but not their numbers."""
    facts: list[object] = []
    for name, inner in module.named_modules():
        settings = [(key, _setting(value)) for key, value in vars(inner).items() if key not in _NUMBERS and key[0] != "_"]
        tensors = [*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)]
        shapes = [(key, tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for key, t in tensors]
        facts.append((name, type(inner).__qualname__, settings, shapes))
    return repr(facts)


def _setting(value: object) -> object:
    """A setting by its value where it is plain, else by its identity: what is shared is alike."""
    plain = isinstance(value, (int, float, str, bool, torch.dtype)) or value is None
    return value if plain else getattr(value, "__qualname__", None) or id(value)
