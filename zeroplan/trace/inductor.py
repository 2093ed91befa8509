"""Inductor's lowering for a GPU that is not there: from a graph to the allocations and frees of its generated code.

Note [Compiling without a GPU]
    What ``torch.compile`` allocates is decided before any kernel is compiled: AOTAutograd's partitioner says what is kept for
    the backward, and inductor's scheduler which buffers exist, which are used again, and where each is freed. All of it reads
    shapes alone, so it runs here on fake tensors of a fake CUDA device, up to the Python wrapper that would launch the kernels.
    That wrapper is then run on the meta device, with kernels that do nothing, under the recorder. Products and attention are
    not fused: the wrapper calls them as operators, and they allocate what they allocate in eager mode.

Note [The fake device]
    Inductor asks the device for the number of its multiprocessors, by which it splits reductions; the partial sums that this
    makes are a few megabytes at most. Patterns that look for a GPU's own kernels are registered as for a CPU, since their
    registration runs operators.

Sources: torch 2.13 ``torch/_inductor/compile_fx.py`` (``_InProcessFxCompile.codegen_and_compile``), ``graph.py``
(``GraphLowering``), ``torch/_functorch/partitioners.py`` (``min_cut_rematerialization_partition``).
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from zeroplan.trace import compiled_attention

_CUDA, _CPU, _META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
#: A Hopper GPU, by the names of ``torch.cuda.get_device_properties``.
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    L2_cache_size=50 << 20,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    gcnArchName="",
)


class NotCompiledError(ValueError):
    """Inductor's code for a graph does more than its allocations can be read from."""


def _device_interface() -> Any:
    """CUDA's device interface of dynamo, answering for the fake device."""
    from torch._dynamo.device_interface import CudaInterface

    def answering(base: type, answers: dict[str, Any]) -> type:
        functions = {name: staticmethod(lambda *_, _answer=answer, **__: _answer) for name, answer in answers.items()}
        return type("FakeCuda", (base,), functions)

    known: dict[str, Any] = {"get_device_properties": _PROPERTIES, "current_device": 0}
    known |= {"is_available": True, "device_count": 1, "get_compute_capability": 90, "get_raw_stream": 0}
    known |= {"is_triton_capable": True, "raise_if_triton_unavailable": None, "is_bf16_supported": True}
    fake: Any = answering(CudaInterface, known)
    fake.Worker = answering(CudaInterface.Worker, {"get_device_properties": _PROPERTIES, "current_device": 0})
    return fake


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Answer inductor's questions about the device; see Note [The fake device]."""
    import torch._inductor.compile_fx
    import torch._inductor.scheduler as scheduler
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph, post_grad, reinplace

    with torch._C.DisableTorchFunction():  # patterns are traced as their authors wrote them
        joint_graph.lazy_init(_CPU)
        post_grad.lazy_init()
    device_interface.get_interface_for_device("cpu")  # fills the table
    fake = _device_interface()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, {"cuda": fake, "cuda:0": fake}))
        for owner, name, value in (
            (scheduler, "has_triton", lambda *_: True),
            (torch.cuda, "get_device_properties", lambda *_: _PROPERTIES),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "current_device", lambda: 0),
            (torch.utils._triton, "triton_hash_with_backend", lambda: ""),
            (joint_graph, "lazy_init", lambda *_: None),
            (post_grad, "lazy_init", lambda *_: None),
            (reinplace, "_inplace_generalized_scatter", lambda into, *_: into),  # copies, which needs a device
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        settings = {"triton.autotune_at_compile_time": False, "compile_threads": 1, "fx_graph_cache": False}
        stack.enter_context(config.patch(settings))
        yield


def _move(graph: Any, device: torch.device) -> Any:
    """Put the fake tensors of a graph on another device, and what it makes there; returns their mode."""
    from torch._subclasses.fake_tensor import FakeTensor

    modes = [one.fake_mode for one in _values(graph) if isinstance(one, FakeTensor)]
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = (_elsewhere(part, device) for part in (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(FakeTensor, lambda value: _on(value, device), node.meta["val"])
    graph.recompile()
    return modes[0]


def _elsewhere(arguments: Any, device: torch.device) -> Any:
    """The arguments of an operator, with another device where they name one."""
    return map_aggregate(arguments, lambda one: device if isinstance(one, torch.device) else one)


def _on(value: Any, device: torch.device) -> Any:
    """A fake tensor like this one, on another device."""
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _propagate(graph: Any, mode: Any, inputs: list[Any]) -> None:
    """Compute the fake tensors of a graph anew, for inputs whose strides may have changed. Random numbers' stay, and those of
    sums into a padded tensor: torch's decomposition negates their mask by an operator that asks for the device.
    """
    from torch._inductor import inductor_prims
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    stays = {inductor_prims.seed, inductor_prims.seeds, inductor_prims.lookup_seed, inductor_prims.random}
    stays.add(torch.ops.aten._unsafe_masked_index_put_accumulate.default)

    class Propagation(FakeTensorProp):  # type: ignore[misc, unused-ignore]
        def run_node(self, n: Any) -> Any:
            return n.meta["val"] if n.target in stays else super().run_node(n)

    Propagation(graph, mode).propagate_dont_convert_inputs(*inputs)


def _values(graph: Any) -> list[Any]:
    """The inputs of a graph."""
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def partition(graph: Any, _inputs: Sequence[Any], *, recomputes: bool = False, **kwargs: Any) -> tuple[Any, Any]:
    """Split a joint graph into forward and backward, as inductor does for a GPU (``compile_fx.partition_fn``).

    With `recomputes` the whole forward lies in one checkpoint: each of its nodes bears the mark that dynamo gives it
    (``TagActivationCheckpoint.tag_nodes`` in ``torch/_higher_order_ops/wrap.py``).
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.virtualized import V

    if recomputes:
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.meta.get("partitioner_tag") != "is_backward":
                node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 0}
    with torch._C.DisableTorchFunction(), torch.no_grad(), fake_gpu(), V.set_fake_mode(_move(graph, _CPU)):
        graph = _recursive_joint_graph_passes(graph, input_device=_CPU)
        _move(graph, _CUDA)
        forward, backward = min_cut_rematerialization_partition(graph, _values(graph), compiler="inductor", **kwargs)
        return forward, backward


def lower(graph: Any, inputs: Sequence[Any], *, backward: bool = False, inference: bool = False) -> Callable[[list[Any]], Any]:
    """Return what runs a forward or backward graph on the meta device, allocating and freeing as its code for a GPU does.

    Args:
        graph: the graph, of fake tensors.
        inference: whether it is a forward without a backward.

    Raises:
        NotCompiledError: where the generated code is in parts, as for CUDA graphs.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), fake_gpu():
        mode = _move(graph, _CUDA)
        there = [_on(value, _CUDA) if isinstance(value, torch.Tensor) else value for value in inputs]
        return _lower(graph, mode, there, backward, inference)


def _lower(graph: Any, mode: Any, inputs: list[Any], backward: bool, inference: bool) -> Callable[[list[Any]], Any]:
    from torch._guards import TracingContext
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    output = next(iter(reversed(graph.graph.nodes)))
    context = TracingContext.try_get()
    facts = getattr(context, "fw_metadata", None)
    visible: list[int] = []
    if facts is not None and not backward:
        first = facts.num_mutated_inp_runtime_indices
        made = pytree.arg_tree_leaves(*output.args)
        visible = [at for at in range(first, first + facts.num_outputs) if isinstance(made[at], torch.fx.Node)]
    output.meta["user_visible_output_idxs"] = visible
    post_grad.view_to_reshape(graph)
    _propagate(graph, mode, inputs)
    compile_fx._recursive_record_original_output_strides(graph)
    with V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(graph, is_inference=inference)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=None, is_backward=backward, is_inference=inference)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            strides = [_strides(out) for out in lowering.graph_outputs]
            code, _ = lowering.codegen()
    if context is not None and context.output_strides is not None:
        context.output_strides.extend(strides)
    return _runnable(code.value)


def _strides(out: Any) -> tuple[int, ...] | None:
    from torch._inductor.ir import IRNode

    if not isinstance(out, IRNode) or not out.has_tensor_output():
        return None
    return tuple(int(stride) for stride in out.get_layout().stride)


# ---- running the generated code -------------------------------------------------------------------------------------------
def _empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=_META)


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _Kernel:
    """A kernel of triton's, which writes into its arguments and allocates nothing."""

    run = staticmethod(_nothing)


class _Products:
    """``extern_kernels``: what writes into an ``out`` allocates nothing beside it."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.aten, name, None)

        def call(*args: Any, **kwargs: Any) -> Any:
            if "out" in kwargs:
                return kwargs["out"]
            if operator is None:
                raise NotCompiledError(f"inductor calls {name}, whose allocations are not known")
            return operator(*args, **kwargs)

        return call


class _Operators:
    """``torch.ops``, with attention's operators in Python."""

    zeroplan = compiled_attention.ALLOCATING

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops, name)


class _Torch:
    """The module ``torch`` as generated code sees it: no device is switched to, and attention is allocated for as by CUDA."""

    cuda = SimpleNamespace(_DeviceGuard=lambda index: contextlib.nullcontext(), set_device=_nothing)
    ops = _Operators()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_NAMES: dict[str, Any] = {
    "torch": _Torch(),
    "aten": torch.ops.aten,
    "inductor_ops": torch.ops.inductor,
    "extern_kernels": _Products(),
    "device": lambda *_: _META,
    "empty_strided": lambda *args, **kwargs: torch.empty_strided(*args, **{**kwargs, "device": _META}),
    "empty_strided_cuda": _empty,
    "empty_strided_cpu": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    "reinterpret_tensor": _reinterpret,
    "assert_size_stride": _nothing,
    "assert_alignment": _nothing,
    "get_raw_stream": _nothing,
    "inf": float("inf"),
    "nan": float("nan"),
}


def _runnable(code: str) -> Callable[[list[Any]], Any]:
    """Return the function ``call`` of generated code, to run on the meta device. It empties the list of its arguments."""
    call = next(node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef) and node.name == "call")
    loaded = {node.id for node in ast.walk(call) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if "self" in loaded:
        raise NotCompiledError("inductor's code is in parts")
    member = call.args.args[0].arg == "self"
    names = {**_NAMES, **{name: _Kernel for name in loaded if name.startswith(("triton_", "cpp_fused"))}}
    exec(compile(ast.Module([call], []), "<inductor>", "exec"), names)
    found = names["call"]

    def run(args: list[Any]) -> Any:
        with torch._C.DisableTorchFunction():
            return found(None, args) if member else found(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
