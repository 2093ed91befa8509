"""The models of the cases: small, with every kind of sharing, freezing and reuse."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz_training.case import Case

VOCAB, LENGTH, BATCH = 19, 5, 2


class Adapted(nn.Module):
    """A linear layer with a low-rank addition."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.inner(x) + self.up(self.down(x)))


class Block(nn.Module):
    mean: torch.Tensor
    table: torch.Tensor

    def __init__(self, case: Case, kind: str, number: int) -> None:
        super().__init__()
        width, hidden = case.width, case.width + (16 if case.float8 else 3) * (number % 2)
        self.case, self.kind = case, kind
        self.norm = nn.LayerNorm(width)
        self.up: nn.Module = nn.Linear(width, 3 * width if kind == "attention" else hidden, bias=number % 2 == 0)
        self.down = nn.Linear(width if kind == "attention" else hidden, width)
        if kind == "mha":
            self.up, self.down = nn.MultiheadAttention(width, 2, batch_first=True), nn.Linear(width, width)
        elif kind == "lstm":
            self.up = nn.LSTM(width, self.down.in_features, batch_first=True)
        if case.weights == "weight-norm":
            parametrizations.weight_norm(self.down)
        elif case.weights == "spectral-norm":
            parametrizations.spectral_norm(self.down)
        if case.batch_norm:
            self.batch_norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3 if case.dropout else 0.0)
        if case.lora:
            self.up = Adapted(cast(nn.Linear, self.up))
        if case.buffers:
            self.register_buffer("mean", torch.zeros(width))
            self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)
        if case.unused and number == 0:
            self.never = nn.Parameter(torch.randn(7))
        if case.odd and number == 0:
            self.empty = nn.Parameter(torch.empty(0))
            self.gain = nn.Parameter(torch.tensor(0.9))
            self.columns = nn.Parameter(torch.randn(width, 3).t() * 0.1)
        #: An alias of a parameter that the forward has taken.
        self.caught: torch.Tensor | None = None
        #: The first step is over.
        self.begun = False

    def forward(self, x: Any) -> Any:
        if self.case.output:
            x = x[0] if self.case.output == "tuple" else x["x"]
        if self.begun or not self.case.late:
            if self.case.clamps == "each":
                clamp(self.down)
            elif self.case.clamps == "data":
                self.down.weight.data.clamp_(-0.2, 0.2)
            if "caught" in self.case.after:
                self.caught = alias_of(self.down.weight, self.case.alias)
        y = self.norm(x)
        if self.case.buffers:
            if self.training and torch.is_grad_enabled():
                with torch.no_grad():
                    self.mean.lerp_(y.detach().mean((0, 1)).to(self.mean.dtype), 0.3)
            y = y + self.mean + self.table.to(y.dtype)
        if self.case.batch_norm:
            y = self.batch_norm(y.transpose(1, 2)).transpose(1, 2)
        y = self.up(y, y, y, need_weights=False) if self.kind == "mha" else self.up(y)
        if self.kind in ("mha", "lstm"):
            y = y[0]
        elif self.kind == "attention":
            q, k, v = y.chunk(3, -1)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = functional.gelu(y)
        y = x + self.dropout(self.down(y))
        if hasattr(self, "gain"):
            y = y * self.gain + (y @ self.columns.t()).mean(-1, keepdim=True)
        return (y, self.kind) if self.case.output == "tuple" else {"x": y} if self.case.output else y


def _halve(grad: torch.Tensor) -> torch.Tensor:
    return 0.5 * grad


def _halve_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 0.5 * output


def _count_call(module: nn.Module, args: Any) -> None:
    vars(module)["calls"] = vars(module).get("calls", 0) + 1


def _halve_grads(module: nn.Module, grads: Any, grads_of_output: Any) -> Any:
    return tuple(None if grad is None else 0.5 * grad for grad in grads)


def clamp(linear: nn.Linear) -> None:
    """Keeps weights within bounds, as some generative models do in their forward."""
    with torch.no_grad():
        linear.weight.clamp_(-0.2, 0.2)


@torch.no_grad()
def alias_of(weight: torch.Tensor, how: str) -> torch.Tensor:
    """Return a tensor that shares memory with `weight`."""
    match how:
        case "data":
            return weight.data
        case "view":
            return weight.view(-1)[1:]
        case "parameter":
            return nn.Parameter(weight.data, requires_grad=False)
    return weight.detach()


class Net(nn.Module):
    """Tokens to a loss, through the blocks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        limit, sparse = 0.5 if case.clamps == "max-norm" else None, case.embedding == "sparse"
        self.embed = nn.Embedding(VOCAB, case.width, max_norm=limit, sparse=sparse)
        kinds = [("mlp", "attention")[i % 2] if case.blocks == "mixed" else case.blocks for i in range(case.depth)]
        blocks = [Block(case, kind, i) for i, kind in enumerate(kinds)]
        if case.container == "none":
            for i, block in enumerate(blocks):
                self.add_module(f"block{i}", block)
        else:
            self.blocks = nn.ModuleList(blocks) if case.container == "list" else nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, VOCAB, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.mul_(0.5)
        self._freeze()
        self._add_hooks()

    def _add_hooks(self) -> None:
        layer = self.stack()[-1].norm
        match self.case.hooks:
            case "forward":
                layer.register_forward_hook(_halve_output)
                self.stack()[0].register_forward_pre_hook(_count_call)
            case "backward":
                layer.register_full_backward_hook(_halve_grads)

    def _freeze(self) -> None:
        if self.case.frozen == "embed":
            self.embed.requires_grad_(False)
        elif self.case.frozen == "first":
            self.stack()[0].requires_grad_(False)
        elif self.case.frozen == "blocks":
            for name, param in self.named_parameters():
                param.requires_grad_(".up.down." in name or ".up.up." in name)

    def add_weight_hook(self) -> None:
        """Adds the hook on a weight, which copies of the model do not have."""
        weight = self.stack()[-1].norm.weight
        if self.case.hooks == "weight" and weight.requires_grad:
            weight.register_hook(_halve)

    def compile_blocks(self) -> None:
        """Compiles the blocks of the ranks' side, without a compiler: it is the graphs that matter."""
        if self.case.compiled:
            for block in self.stack():
                block.compile(backend="aot_eager")

    def stack(self) -> list[Block]:
        """Return the blocks."""
        if self.case.container == "none":
            return [cast(Block, getattr(self, f"block{i}")) for i in range(self.case.depth)]
        return [cast(Block, block) for block in self.blocks]

    def forward(self, tokens: torch.Tensor, number: int = 0, extra: torch.Tensor | None = None) -> torch.Tensor:
        if self.case.clamps == "root":
            clamp(self.head)
        if self.case.dropout:
            torch.manual_seed(int(tokens.sum()) + number)
        x = self.embed(tokens)
        if extra is not None:
            x = x + extra
        blocks = self.stack()
        for block in blocks:
            block.begun = number > 0
        order = list(range(len(blocks)))
        if self.case.order == "twice":
            order.append(0)
        elif self.case.order == "alternating":
            order.remove(number % len(blocks))
        elif self.case.order == "backwards":
            order.reverse()
        weight = blocks[-1].down.weight
        if self.case.reads == "before":
            x = x + functional.linear(x, weight[:, : x.shape[-1]])
        for i in order:
            x = self._wrap(x)
            if self.case.checkpointing and torch.is_grad_enabled():
                x = checkpoint(blocks[i], x, use_reentrant=self.case.checkpointing == "reentrant")
            else:
                x = blocks[i](x)
            x = self._unwrap(x)
        if self.case.reads == "after":
            x = x + functional.linear(x, weight[:, : x.shape[-1]])
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def _wrap(self, x: torch.Tensor) -> Any:
        return (x, "") if self.case.output == "tuple" else {"x": x} if self.case.output else x

    def _unwrap(self, x: Any) -> torch.Tensor:
        found: torch.Tensor = x[0] if self.case.output == "tuple" else x["x"] if self.case.output else x
        return found


def make(case: Case) -> Net:
    """Build the model of `case`, with the values of its seed."""
    torch.manual_seed(case.seed)
    return Net(case)


def tokens(case: Case, step: int, micro: int, rank: int) -> torch.Tensor:
    """Return the [BATCH, LENGTH] tokens that `rank` sees."""
    generator = torch.Generator().manual_seed(((case.seed * 31 + step) * 331 + micro) * 31 + rank)
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
