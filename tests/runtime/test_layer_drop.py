"""Progressive layer dropping: the published rule, trainings held against plain torch, restarts, keys and plans."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroplan
import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan.core.layer_drop import ProgressiveLayerDrop
from zeroplan_runtime.config import read_config

pytestmark = [pytest.mark.torch]

#: θ falls fast, so that few steps leave blocks out.
SECTION: dict[str, Any] = {"progressive_layer_drop": {"enabled": True, "theta": 0.2, "gamma": 0.7}}
RULE = ProgressiveLayerDrop(0.2, 0.7)
SEED, STEPS, DEPTH = 5, 8, 5


def test_the_rule_is_the_papers() -> None:
    rule = ProgressiveLayerDrop()
    assert (rule.theta, rule.gamma) == (0.5, 0.001)
    assert rule.keep_probabilities(0, 4) == (1.0,) * 4
    assert rule.theta_at(1000) == pytest.approx(0.5 * math.exp(-1) + 0.5)
    falls = 1 - rule.theta_at(1000)
    assert rule.keep_probabilities(1000, 4) == pytest.approx((1.0, 1 - falls / 4, 1 - falls / 2, 1 - 3 * falls / 4))
    assert rule.mean_kept(1000, 1001, 4) == pytest.approx(1 - 1.5 / 4 * falls)
    assert ProgressiveLayerDrop(0.0, 9.0).keep_probabilities(100, 4) == pytest.approx((1.0, 0.75, 0.5, 0.25))


def test_draws_have_their_probabilities_and_follow_from_seed_and_step() -> None:
    draws = [RULE.kept(step, 6, seed=3) for step in range(50, 4050)]
    shares = [sum(layer) / len(draws) for layer in zip(*draws, strict=True)]
    assert shares == pytest.approx(RULE.keep_probabilities(4000, 6), abs=0.03)
    assert shares[0] == 1.0
    assert draws == [RULE.kept(step, 6, seed=3) for step in range(50, 4050)]
    assert draws != [RULE.kept(step, 6, seed=4) for step in range(50, 4050)]


class Dropping(nn.Module):
    """:class:`models.Tiny` whose forward leaves out the blocks of `step`, as plain torch would be written."""

    def __init__(self, model: models.Tiny) -> None:
        super().__init__()
        self.model, self.step = model, 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        model, layers = self.model, len(self.model.blocks)
        kept, weights = RULE.kept(self.step, layers, SEED), RULE.keep_probabilities(self.step, layers)
        x = model.embed(tokens)
        for block, keep, weight in zip(model.blocks, kept, weights, strict=True):
            if keep:
                x = x + (block(x) - x) / weight
        logits = model.head(model.norm(x)).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def plain_losses(ranks: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    plain = models.Plain(Dropping(models.make(0)), lambda params: torch.optim.AdamW(params, 1e-2, weight_decay=0.1), ranks, 2)
    losses = []
    for number in range(STEPS):
        plain.model.step = number  # type: ignore[assignment]
        losses.append(plain.step(number))
    return losses, {name.removeprefix("model."): value.detach() for name, value in plain.masters.items()}


def start(group: dist.ProcessGroup, config: dict[str, Any], remat: str = "") -> zeroplan_runtime.Engine:
    model = models.make(0, remat=remat)
    torch.manual_seed(SEED + dist.get_rank(group))  # the first rank's counts
    return zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")[0]


def steps(engine: zeroplan_runtime.Engine, first: int, last: int, rank: int) -> list[float]:
    losses = []
    for number in range(first, last):
        total = 0.0
        for micro in range(2):
            total += engine.backward(engine(models.batch(number, micro, rank))).item()
            engine.step()
        losses.append(total)
    return losses


def train(group: dist.ProcessGroup, stage: int, remat: str, folder: str) -> dict[str, Any]:
    rank = dist.get_rank(group)
    offload = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}} if remat == "offload" else {}
    config = ds_config(stage, gradient_accumulation_steps=2, **SECTION, zero_optimization={"stage": stage, **offload})
    engine = start(group, config, "" if remat == "offload" else remat)
    gathered: list[str] = []
    unshard = engine.schedule.unshard

    def noted(unit: Any, **how: Any) -> None:
        gathered.append(unit.name)
        unshard(unit, **how)

    vars(engine.schedule)["unshard"] = noted
    losses = steps(engine, 0, 3, rank)
    engine.save_checkpoint(folder)
    losses += steps(engine, 3, 4, rank)
    del gathered[:]
    losses += steps(engine, 4, 5, rank)
    seen = set(gathered)
    losses += steps(engine, 5, STEPS, rank)
    params = engine.module_state_dict()
    engine.eval()
    with torch.no_grad():
        whole = engine(models.batch(9, 0, 0)).item()
    theta, seed = (
        engine.get_pld_theta(),
        engine.techniques.layer_drop.seed if engine.techniques.layer_drop is not None else None,
    )
    engine.destroy()
    resumed = start(group, config)
    assert resumed.techniques.layer_drop is not None
    resumed.techniques.layer_drop.seed = 0
    resumed.load_checkpoint(folder)
    after = steps(resumed, 3, STEPS, rank)
    return {"losses": losses, "params": params, "seen": seen, "whole": whole, "theta": theta, "seed": seed, "after": after}


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_training_is_plain_torchs_with_the_same_blocks_left_out_and_resumes(
    pool: RankPool, tmp_path: Path, stage: int
) -> None:
    expected, params = plain_losses(2)
    all_blocks = models.make(0)
    all_blocks.load_state_dict(params)
    whole = all_blocks(models.batch(9, 0, 0)).item()
    left_out = [RULE.kept(step, DEPTH, SEED) for step in range(STEPS)]
    assert not all(left_out[4])  # or the test shows nothing
    remats = {0: ("",), 2: ("reentrant", "not reentrant"), 3: ("", "reentrant", "not reentrant", "offload")}[stage]
    for remat in remats:
        for rank, found in enumerate(pool.run(2, train, stage, remat, str(tmp_path / remat))):
            assert found["losses"] == pytest.approx([row[rank] for row in expected], abs=2e-5)
            assert found["after"] == pytest.approx(found["losses"][3:], abs=1e-6)
            assert found["whole"] == pytest.approx(whole, abs=1e-4)
            if rank == 0:
                distance = max((found["params"][name] - value).abs().max().item() for name, value in params.items())
                assert distance < 2e-4
            assert found["seed"] == SEED
            assert found["theta"] == RULE.theta_at(STEPS)
            if stage == 3:
                gone = {f"blocks.{index}" for index, keep in enumerate(left_out[4]) if not keep}
                later = {f"blocks.{index}" for index, keep in enumerate(left_out[5]) if not keep}
                assert not (found["seen"] & gone & later)


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_models_of_transformers_leave_layers_out(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    made = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_key_value_heads=2)),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**size)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=4, n_head=2)),
    }
    torch.manual_seed(SEED)
    model = made[kind]()
    config = ds_config(3, **SECTION, train_micro_batch_size_per_gpu=2)
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, device="cpu")
    assert engine.techniques.layer_drop is not None
    ran: list[int] = []
    blocks = [place for place in model.modules() if "_layer_drop" in vars(place)]
    for index, block in enumerate(blocks):
        inner = next(child for child in block.modules() if isinstance(child, nn.LayerNorm) or "Norm" in type(child).__name__)
        inner.register_forward_hook(lambda *_, index=index: ran.append(index))
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    for step in range(6):
        del ran[:]
        loss = engine(input_ids=tokens, labels=tokens).loss
        assert [index in ran for index in range(4)] == list(RULE.kept(step, 4, engine.techniques.layer_drop.seed))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    assert len(blocks) == 4
    assert not any("forward" in vars(block) for block in blocks)


class Returns(nn.Module):
    """Blocks that return what layer dropping does not know."""

    def __init__(self, extra: Any, *, narrower: bool = False) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(4, 2 if narrower else 4), extra

    def forward(self, hidden_states: torch.Tensor) -> Any:
        found = self.linear(hidden_states)
        return found if self.extra is None else (found, self.extra)


def test_what_is_refused() -> None:
    for section, said in (
        ({"theta": 1.5}, "progressive_layer_drop.theta: 1.5 is no share from 0 to 1"),
        ({"gamma": -1}, "progressive_layer_drop.gamma: -1"),
        ({"thetta": 1}, "did you mean 'theta'"),
    ):
        with pytest.raises(BadInput) as fault:
            read_config({"progressive_layer_drop": {"enabled": True, **section}}, 1)
        assert said in str(fault.value)
    assert read_config({"progressive_layer_drop": {"enabled": False, "theta": 0.5}}, 1).layer_drop is None
    assert read_config(SECTION, 1).layer_drop == RULE
    assert read_config({"progressive_layer_drop": RULE.as_section()}, 1).layer_drop == RULE
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(0, **SECTION), device="cpu")
    with pytest.raises(BadInput, match="blocks that may be left out are not compiled"):
        engine.compile()
    two = nn.ModuleDict({"a": nn.ModuleList(models.Block(4, 4) for _ in range(2)), "b": nn.Sequential()})
    two["b"] = nn.ModuleList(models.Block(4, 4) for _ in range(2))
    for model, said in (
        (two, "whose blocks are one stack of one class"),
        (nn.Linear(2, 2), "whose blocks are one stack of one class"),
        (nn.Sequential(Returns(torch.ones(1)), Returns(None)), "return hidden states alone"),
        (nn.Sequential(Returns(None, narrower=True), Returns(None)), "of the shape that they get"),
    ):
        with pytest.raises(BadInput, match=said):
            zeroplan_runtime.initialize(model=model, config=ds_config(0, **SECTION), device="cpu")[0](torch.rand(2, 4))


LLAMA = "meta-llama/Llama-3.2-1B"
FILE = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


def test_a_plan_is_of_all_layers_and_leaves_the_fit_open() -> None:
    def plan(model: str = LLAMA, **more: Any) -> Any:
        config = {**FILE, **more.pop("section", {})}
        return zeroplan.estimate(model, ds_config=config, engine=more.pop("engine", "zeroplan"), vram="80G", **more)[0]

    found, without = plan(section=SECTION), plan()
    assert found.gpu.peak_allocated == without.gpu.peak_allocated
    assert (found.fits, without.fits) == (None, True)
    assert [one.key for one in found.unmodelled] == ["progressive_layer_drop"]
    assert found.settle == "train until theta is low, and read torch.cuda.max_memory_reserved"
    with pytest.raises(BadInput, match=r"zeroplan's runtime has it \(--engine zeroplan\)"):
        plan(section=SECTION, engine="deepspeed")
    with pytest.raises(BadInput, match="progressive_layer_drop: it is not supported with tp"):
        plan(section=SECTION, gpus=2, tp=2)
    with pytest.raises(BadInput, match="one stack of blocks, and the model has decoder"):
        plan("google-t5/t5-base", section=SECTION)
    with pytest.raises(BadInput, match="plans are of all layers"):
        zeroplan.verify(LLAMA, ds_config={**FILE, **SECTION}, engine="zeroplan", seq_len=64)
