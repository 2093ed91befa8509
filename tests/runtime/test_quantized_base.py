"""A quantised base with adapters on several ranks: held in buffers it trains as in plain torch, as parameters it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from zeroplan.core.errors import BadInput

pytestmark = [pytest.mark.torch]

WIDTH, HIDDEN, VOCAB, RANK = 32, 64, 50, 4
EPS = 1e-2  # keeps Adam from turning rounding into steps


class Quantised(nn.Module):
    """A frozen linear layer in 4 or 8 bits, one scale a row, and a low-rank addition."""

    def __init__(self, inputs: int, outputs: int, bits: int, *, as_parameter: bool) -> None:
        super().__init__()
        self.shape, self.bits = (outputs, inputs), bits
        weight, most = torch.randn(outputs, inputs) * inputs**-0.5, (1 << (bits - 1)) - 1
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / most)
        codes = (weight / self.scale).round().to(torch.int8)
        if bits == 4:
            pairs = (codes + 8).to(torch.uint8).view(-1, 2)
            codes = (pairs[:, 0] | pairs[:, 1] << 4).view(-1, 1)
        if as_parameter:
            self.weight = nn.Parameter(codes, requires_grad=False)
        else:
            self.register_buffer("weight", codes)
        self.down, self.up = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes: Any = self.weight
        if self.bits == 4:
            codes = torch.stack([codes.view(-1) & 15, codes.view(-1) >> 4], 1).view(self.shape).to(torch.int8) - 8
        added: torch.Tensor = functional.linear(x, codes.float() * self.scale) + self.up(self.down(x))
        return added


class Block(nn.Module):
    def __init__(self, bits: int, *, as_parameter: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Quantised(WIDTH, HIDDEN, bits, as_parameter=as_parameter)
        self.down = Quantised(HIDDEN, WIDTH, bits, as_parameter=as_parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, bits: int, *, as_parameter: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(bits, as_parameter=as_parameter) for _ in range(3))
        for frozen in (self.embed, self.head):
            frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


def config(stage: int) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "eps": EPS, "weight_decay": 0.01}}
    zero = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, **zero}


def trained(group: Any, bits: int, stage: int) -> None:
    torch.manual_seed(0)
    net = Model(bits)
    plain = copy.deepcopy(net)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, eps=EPS)
    engine, *_ = zeroplan_runtime.initialize(model=net, config=config(stage), group=group, device="cpu")
    ranks = group.size()
    for step in range(3):
        loss = engine(batch(step, group.rank()))
        engine.backward(loss)
        engine.step()
        losses = [plain(batch(step, rank)) for rank in range(ranks)]
        (sum(losses) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, losses[group.rank()], rtol=1e-5, atol=1e-6)
    state = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        if state:
            assert state[name].dtype == value.dtype
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    engine.destroy()


def refused(group: Any, stage: int) -> str:
    with pytest.raises(BadInput) as fault:
        zeroplan_runtime.initialize(model=Model(4, as_parameter=True), config=config(stage), group=group, device="cpu")
    return str(fault.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bits", [4, 8])
def test_in_buffers_it_trains_as_in_plain_torch(pool: RankPool, bits: int, stage: int) -> None:
    pool.run(2, trained, bits, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_as_parameters_it_is_refused_on_every_rank(pool: RankPool, stage: int) -> None:
    for said in pool.run(2, refused, stage):
        assert "parameter 'blocks.0.up.weight' holds uint8, which is not trained or divided" in said
        assert "keep quantised weights as buffers" in said
