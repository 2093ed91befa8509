"""Runs one micro batch of a model on the meta device and records it.

Note [Halves]
    torch's own functions run both halves on the meta device, so what they keep for each other is recorded and not modelled:
    ``stage_backward_input`` runs the graph to the stage's input and keeps it, with the gradients that arrive at each weight's
    product; ``stage_backward_weight`` then runs the products, parameter by parameter in their order, and drops the graph.
    What the stage receives is the embedding's output here. A first stage, which receives none, runs its whole backward in the
    second half. Source: torch/distributed/pipelining/_backward.py, stage.py (``backward_weight_one_chunk``)

    A weight's gradient belongs to the engine once those functions hold it no more, which is a product later where it is only
    added to an earlier one.

    torch 2.11, which plans are held to, adds up the gradients that arrived at a product before it runs the product, and so
    copies the only one; each copy stays until the next is made. 2.13 passes them on as they are. :func:`copied_gradients` makes
    those copies under it, too. Source: _backward.py of 2.11 (``summed_grad``)
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from zeroplan.core.errors import BadInput
from zeroplan.tape.expanded import Mark, Op
from zeroplan.tape.options import Checkpointing, FreezingTechnique, KernelTechnique, LossTechnique, TraceOptions
from zeroplan.trace.compiled import CompiledRegions
from zeroplan.trace.functions import CudaFunctions
from zeroplan.trace.hooks import ModuleHooks
from zeroplan.trace.known import KnownValues
from zeroplan.trace.pair_loss import loss_of_pairs
from zeroplan.trace.quiet import errors_alone
from zeroplan.trace.ranks import ALONE, Ranks
from zeroplan.trace.recorder import Recording, StorageRecorder
from zeroplan.trace.selective import checkpoint_every, checkpoint_groups, contexts


@contextmanager
def copied_gradients() -> Iterator[None]:
    """Copy the gradient at each weight's product while ``stage_backward_weight`` runs. See Note [Halves]."""
    place: Any = torch.autograd
    plain = place.grad
    copies: list[Any] = []

    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
        if outputs and isinstance(outputs[0], GradientEdge):
            copies[:] = [one + 0 for one in grad_outputs]
            grad_outputs = copies
        return plain(outputs, inputs, grad_outputs=grad_outputs, **options)

    if "sum(" in inspect.getsource(stage_backward_weight):
        yield
        return
    place.grad = grad
    try:
        yield
    finally:
        place.grad = plain


class BackwardInHalves:
    """Runs one backward of a model in two halves. Make it before the forward."""

    def __init__(self, model: nn.Module, recorder: StorageRecorder) -> None:
        from zeroplan_runtime.pipeline_halves import StandIn  # few traces are of halves

        base: Any = model
        embedding = base.get_input_embeddings()
        apart = {id(param) for param in embedding.parameters()}
        self._recorder = recorder
        self._received: list[torch.Tensor] = []
        self._weights: list[Any] = [
            StandIn(param, partial(recorder.gradient_when_dropped, index))
            for index, param in enumerate(model.parameters())
            if param.requires_grad and id(param) not in apart
        ]
        self._handle = embedding.register_forward_hook(self._receive)

    def _receive(self, _: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        received = output.detach().requires_grad_()
        self._received.append(received)
        return received

    def run(self, loss: torch.Tensor) -> None:
        """Run both halves."""
        self._handle.remove()
        _, groups = stage_backward_input([loss], None, self._received, iter(self._weights))
        self._recorder.mark(Mark.WEIGHTS_BEGIN)
        with copied_gradients():
            stage_backward_weight(iter(self._weights), groups)


def record(
    model: nn.Module,
    inputs: Callable[[], Mapping[str, Any]],
    options: TraceOptions,
    ranks: Ranks = ALONE,
    *,
    needs_loss: bool = False,
) -> Recording:
    """Record the forward, the loss and the backward of one micro batch.

    The garbage collector is off meanwhile, so that storages are freed by reference counts alone, as on a GPU.

    Args:
        model: the model, on the meta device.
        inputs: returns the keyword arguments of the model's forward.
        options: how the model runs.
        ranks: the rank that runs it.
        needs_loss: refuse a model that returns no loss, instead of taking the mean of what it returns.

    Raises:
        BadInput: a model without the loss that it needs.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with errors_alone():
            return _record(model, inputs, options, ranks, needs_loss)
    finally:
        if collecting:
            gc.enable()


def _record(
    model: nn.Module, inputs: Callable[[], Mapping[str, Any]], options: TraceOptions, ranks: Ranks, needs_loss: bool
) -> Recording:
    outside = [ranks.local(tensor) for tensor in (*model.parameters(), *model.buffers())]
    known = KnownValues() if options.media or _reads_tokens(model) else None
    recorder = StorageRecorder(outside, unwrapped=ranks.unwrapped, known=known)
    regions = _regions(model, options)
    follower = ModuleHooks(model, recorder, zero3=options.zero3, local=ranks.local, left_out=regions.inner)
    autocast = torch.bfloat16 if options.arithmetic.autocasts else None
    code = {sys.modules[type(module).__module__] for module in model.modules()} if autocast else ()
    functions = CudaFunctions(autocast, zero3=options.zero3, switching=code, known=known is not None)
    if options.checkpointing not in (Checkpointing.NONE, Checkpointing.IN_GRAPH):
        checkpoint_blocks(model, options, functions)
    try:
        with ranks.running(), regions, _other_kernels(model, options), recorder, functions:
            batch = inputs()
            keeping: Any = model
            if hasattr(keeping, "on_output"):  # a loop that keeps the output by name until it has the next one
                keeping.on_output = lambda: recorder.out.add(Op.MARK, Mark.OUTPUT)
            halves = BackwardInHalves(model, recorder) if options.halves else None
            recorder.mark(Mark.FORWARD_BEGIN)
            with torch.set_grad_enabled(not options.evaluation):
                if options.pairs is not None:
                    loss = loss_of_pairs(model, batch, options.pairs.loss, wide=options.pairs.wide_logits)
                elif made := [one for one in options.techniques if isinstance(one, LossTechnique)]:
                    loss = made[0].loss(model, batch)
                else:
                    loss = loss_of(model(**batch), required=needs_loss)
            functions.drop_casts()
            recorder.mark(Mark.FORWARD_END)
            recorder.mark(Mark.BACKWARD_BEGIN)
            if halves is not None:
                halves.run(loss)
            elif not options.evaluation:
                _backward(loss)
            recorder.mark(Mark.BACKWARD_END)
            del halves
            del loss  # after the mark, since training loops keep the loss and its graph until the next one
            del batch
    finally:
        follower.detach()
    return recorder.out


def _other_kernels(model: nn.Module, options: TraceOptions) -> contextlib.ExitStack:
    """The kernels that techniques run in place of the model's own; none in compiled graphs."""
    stack = contextlib.ExitStack()
    for one in options.techniques if options.graphs is None else ():
        if isinstance(one, KernelTechnique):
            stack.enter_context(one.running(model))
    return stack


def _reads_tokens(model: nn.Module) -> bool:
    """Return whether the model's forward reads values of its tokens: where a sample ends."""
    config = getattr(model, "config", None)
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    return classifies and bool(getattr(config, "is_encoder_decoder", False))


def _regions(model: nn.Module, options: TraceOptions) -> CompiledRegions:
    """The compiled parts of the model; without ``torch.compile`` there are none, and inductor is not imported."""
    every = options.every if options.checkpointing is Checkpointing.IN_GRAPH else 0
    if options.graphs is None:
        return CompiledRegions(nn.Module())
    checkpoints = options.checkpointing is not Checkpointing.NONE
    return CompiledRegions(model, every=every, between=options.graphs.between, checkpoints=checkpoints)


def _backward(loss: torch.Tensor) -> None:
    """Run the backward as ``loss.backward()`` does, but inside the function mode that recomputation needs."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def checkpoint_blocks(model: nn.Module, options: TraceOptions, functions: CudaFunctions) -> None:
    """Turn on the model's gradient checkpointing. Random states are not kept: on a GPU they lie in host memory."""
    peft: Any = getattr(model, "get_base_model", None)
    base: Any = peft() if peft is not None else model
    kwargs: dict[str, Any] = {"use_reentrant": options.checkpointing is Checkpointing.REENTRANT, "preserve_rng_state": False}
    if options.checkpointing in (Checkpointing.SELECTIVE, Checkpointing.ALTERNATE):
        kwargs["context_fn"] = partial(contexts, functions, alternate=options.checkpointing is Checkpointing.ALTERNATE)
    elif not kwargs["use_reentrant"]:
        kwargs["context_fn"] = functions.recomputation
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    for one in options.techniques:
        if isinstance(one, FreezingTechnique):
            one.checkpoint(base)
    if options.every > 1:
        checkpoint_every(base, options.every)
    if options.grouped is not None:
        checkpoint_groups(base, *options.grouped)


def loss_of(output: Any, *, required: bool = False) -> torch.Tensor:
    """Return the loss of what a model returned: its `loss`, the first tensor, or the sum of the only one.

    Raises:
        BadInput: when it has no `loss` and one is `required`.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and required:
        raise BadInput("returns no loss for a batch of its inputs and labels", remedy="give the module and inputs")
    if loss is None:
        loss = output[0] if isinstance(output, (tuple, list)) else output
    tensor: torch.Tensor = loss
    return tensor if tensor.dim() == 0 else tensor.float().mean()
