"""Redirects torch functions that run other operators on CUDA than on the meta device.

These are attention, dropout (CUDA keeps a one-byte mask) and autocast, which does not know the meta device: its casting rules
(``aten/src/ATen/autocast_mode.h``) are applied here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from zeroplan.trace.attention import scaled_dot_product_attention

#: Functions that autocast runs in 16 bits, by name.
_LOWER = frozenset(
    ("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
     "prelu", "addmm", "addmv", "addr", "matmul", "__matmul__", "__rmatmul__", "einsum", "mm", "mv", "linalg_vecdot",
     "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "scaled_dot_product_attention")
)  # fmt: skip
#: Functions that autocast runs in fp32.
_FP32 = frozenset(
    ("__rpow__", "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
     "sinh", "tan", "pow", "__pow__", "square", "softplus", "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm",
     "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss_nd",
     "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
     "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
     "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "prod", "softmax", "log_softmax",
     "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "norm", "sum")
)  # fmt: skip


class CudaFunctions(TorchFunctionMode):
    """Redirects torch functions within its context.

    Args:
        autocast: autocast's 16-bit dtype; None for no autocast.
        zero3: replace linear layers by DeepSpeed's (``deepspeed/runtime/zero/linear.py``), as stage 3 does by default.
        switching: Python modules in which models switch autocast off for some of their arithmetic.
        known: whether the run follows values (:mod:`zeroplan.trace.known`), so that a tensor made of numbers keeps them.
    """

    def __init__(
        self,
        autocast: torch.dtype | None = None,
        *,
        zero3: bool = False,
        switching: Iterable[Any] = (),
        known: bool = False,
    ) -> None:
        super().__init__()
        self._known = known
        self.autocast = autocast
        self._zero3 = zero3
        self._switching = [m for m in switching if hasattr(m, "maybe_autocast")]
        self._replaced: list[tuple[Any, str, Any]] = []
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> Any:
        def nested(*args: Any, **kwargs: Any) -> _Nested:
            return _Nested(self, kwargs.get("enabled", True))

        self._replace(torch, "autocast", nested)
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

        def is_enabled(*device: str) -> bool:
            return self.autocast is not None if device == ("meta",) else enabled(*device)

        def dtype_of(device: str) -> torch.dtype:
            return self.autocast if device == "meta" and self.autocast is not None else dtype(device)

        self._replace(torch, "is_autocast_enabled", is_enabled)  # for modules that ask, and cast by themselves
        self._replace(torch, "get_autocast_dtype", dtype_of)
        if self.autocast is not None:
            for module in self._switching:  # transformers' own switch ignores the meta device
                self._replace(module, "maybe_autocast", nested)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        while self._replaced:
            setattr(*self._replaced.pop())

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def drop_casts(self) -> None:
        """Free the 16-bit copies of weights, as autocast does when its region ends."""
        self._casts.clear()

    def recomputation(self) -> tuple[Any, Any]:
        """Contexts for a checkpointed block's forward and recomputation; the latter is an autocast region of its own."""
        return contextlib.nullcontext(), _Region(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.autocast is not None:
            if name in _LOWER:
                args, kwargs = self._cast_all(args, kwargs, self._lower)
            elif name in _FP32 and kwargs.get("dtype") is None:
                args, kwargs = self._cast_all(args, kwargs, _upper)
            elif func is torch.nn.functional.cross_entropy:
                return _cross_entropy(*args, **kwargs)
        if func is torch.tensor and self._known and torch.device(kwargs.get("device") or "cpu").type == "meta":
            numbers = tree_map(lambda leaf: leaf.item() if isinstance(leaf, torch.Tensor) else leaf, args)
            return func(*numbers, **{**kwargs, "device": "cpu"}).to("meta")
        if self._zero3 and func is torch.nn.functional.linear:
            return _Zero3Linear.apply(*args, **kwargs)
        if func is torch.nn.functional.multi_head_attention_forward:
            return self._attention_layer(func, args, kwargs)
        redirect = _REDIRECTS.get(name)
        if redirect is not None:
            return redirect(func, args, kwargs)
        return func(*args, **kwargs)

    def _attention_layer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the body of ``nn.MultiheadAttention``, whose own calls are redirected as well.

        It is a function in Python that first asks whether it is redirected. Here it is told once that it is not: what follows
        runs under this mode.
        """
        home: Any = torch.nn.functional
        asks = home.has_torch_function

        def answer_once(_: Any) -> bool:
            home.has_torch_function = asks
            return False

        home.has_torch_function = answer_once
        super().__enter__()
        try:
            return func(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)
            home.has_torch_function = asks

    def _lower(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.autocast is not None
        if not tensor.is_floating_point() or tensor.dtype == self.autocast or tensor.dtype == torch.float64:
            return tensor
        if tensor.dtype == torch.float32 and tensor.is_leaf and tensor.requires_grad and not tensor._is_view():
            kept = self._casts.get(id(tensor))
            if kept is None:
                kept = self._casts[id(tensor)] = (tensor, tensor.to(self.autocast))
            return kept[1]
        return tensor.to(self.autocast)

    @staticmethod
    def _cast_all(args: Any, kwargs: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
        def one(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return cast(value)
            return type(value)(map(one, value)) if type(value) in (list, tuple) else value

        # Last to first, which is the order in which PyTorch's binaries evaluate the arguments of a call.
        named = {key: one(value) for key, value in reversed(kwargs.items())}
        return tuple(reversed([one(value) for value in reversed(args)])), named


class _Nested:
    """``torch.autocast`` within the region, by which models switch it off for some of their arithmetic."""

    def __init__(self, functions: CudaFunctions, enabled: bool) -> None:
        self._functions, self._enabled = functions, enabled

    def __enter__(self) -> None:
        self._before = self._functions.autocast
        if not self._enabled:
            self._functions.autocast = None

    def __exit__(self, *exc: object) -> None:
        self._functions.autocast = self._before


class _Region:
    """An autocast region within the backward."""

    def __init__(self, functions: CudaFunctions) -> None:
        self._functions = functions

    def __enter__(self) -> None:
        self._functions.drop_casts()

    def __exit__(self, *exc: object) -> None:
        self._functions.drop_casts()


def _upper(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute ``F.cross_entropy`` as autocast does, which knows its parts alone: log-softmax in the logits' dtype, ``nll_loss``
    in fp32.

    Source: aten/src/ATen/native/LossNLL.cpp, cross_entropy_loss, which names the dtype to ``log_softmax``.
    """
    if target.is_floating_point() or label_smoothing:  # no operator of these is cast
        smooth = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
        return torch.nn.functional.cross_entropy(logits, target, ignore_index=ignore_index, **smooth)  # type: ignore[arg-type]
    logs = torch.log_softmax(logits, 1 if logits.dim() > 1 else 0)
    return torch.nn.functional.nll_loss(_upper(logs), target, weight, ignore_index=ignore_index, reduction=reduction)


class _Zero3Linear(torch.autograd.Function):
    """y = x·Wᵀ + b with the operators, and in the order, of DeepSpeed's replacement."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        out = x.matmul(weight.t())
        if bias is not None:
            out += bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        flat = list(range(grad.dim() - 1))
        if ctx.needs_input_grad[0]:
            grad_x = grad.matmul(weight)
        if ctx.needs_input_grad[1]:
            grad_weight = grad.reshape(-1, grad.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(flat)
        return grad_x, grad_weight, grad_bias


class _GroupedProduct(torch.autograd.Function):
    """The product of each group of rows with its own matrix, for dtypes that the meta device refuses.

    Each is kept for the other's gradient alone, as torch's ``derivatives.yaml`` has it of ``_grouped_mm``.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        need_rows, need_matrices = ctx.needs_input_grad
        ctx.save_for_backward(rows if need_matrices else None, matrices if need_rows else None)
        ctx.like = tuple((one.shape, one.stride(), one.dtype, one.device) for one in (rows, matrices))
        return rows.new_empty((rows.shape[0], matrices.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(
            torch.empty_strided(shape, stride, dtype=dtype, device=device) if needed else None
            for (shape, stride, dtype, device), needed in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )


def _grouped(func: Any, args: Any, kwargs: Any) -> Any:
    if args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    return _GroupedProduct.apply(args[0], args[1])


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    return scaled_dot_product_attention(*args, **kwargs)


def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    bound = dict(zip(("input", "p", "training", "inplace"), args, strict=False), **kwargs)
    x, p, training = bound["input"], bound.get("p", 0.5), bound.get("training", bound.get("train", True))
    if training and 0 < p < 1 and x.numel() > 0 and not bound.get("inplace", False):
        return torch.native_dropout(x, p, True)[0]
    return func(*args, **kwargs)


_REDIRECTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "grouped_mm": _grouped,
    "_grouped_mm": _grouped,
}
