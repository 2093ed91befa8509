"""FSDP 1 with frozen units under reentrant checkpoints: what torch holds until a backward's end, and the plan beside it."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.small_llama import small_llama
from zeroplan.core.errors import BadInput
from zeroplan.interop.readers import read_setup
from zeroplan.planner.estimate import estimate_report, estimate_runs
from zeroplan.run.ask import Ask

LAYERS, WIDTH, TOKENS = 6, 256, 2 * 600
ASKED: dict[str, Any] = {
    "model": small_llama(layers=LAYERS, width=WIDTH, vocab=64),
    "engine": "fsdp",
    "stage": 3,
    "gpus": 2,
    "gpu": "H200",
    "lora_rank": 8,
    "lora_targets": ["q_proj"],
    "seq_len": 600,
    "micro_batch": 2,
    "gradient_checkpointing": True,
    "detached_loss": True,
}


@pytest.mark.torch
@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_holds_the_inputs_of_reentrant_blocks(reentrant: bool, tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.utils.checkpoint import checkpoint

    inputs: dict[int, list[weakref.ref[torch.Tensor]]] = {}
    held: list[tuple[int, bool]] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.added = nn.Linear(8, 8), nn.Linear(8, 8)
            self.base.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.base(x) + self.added(x)
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.h = nn.Embedding(10, 8), nn.ModuleList(Block() for _ in range(3))
            self.embedding.requires_grad_(False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids).requires_grad_(True)
            for block in self.h:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x.sum()

    def wraps(module: nn.Module, recurse: bool, **_: Any) -> bool:
        return recurse or isinstance(module, Block) or (isinstance(module, nn.Linear) and module.weight.requires_grad)

    def entered(at: int) -> Any:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if at == 0 and torch.is_grad_enabled():
                alive = [one() for refs in inputs.values() for one in refs]
                held[:] = [(id(one), one.is_leaf and one.grad is not None) for one in alive if one is not None]
            if at > 0 and torch.is_grad_enabled():
                inputs.setdefault(at, []).append(weakref.ref(args[0]))

        return hook

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model: Any = FullyShardedDataParallel(Model(), auto_wrap_policy=wraps, device_id=torch.device("cpu"))
        for at, block in enumerate(model.module.h):
            block.register_forward_pre_hook(entered(at))
        model(torch.zeros(4, dtype=torch.long)).backward()
    finally:
        dist.destroy_process_group()
    # while the first block's backward runs, both behind it: their inputs, with gradients
    assert [graded for _, graded in held] == ([True, True] if reentrant else [])
    assert all(one() is None for refs in inputs.values() for one in refs)


@pytest.mark.torch
def test_the_plan_holds_them_too() -> None:
    """At the backward's end the inputs of all blocks and their gradients, where without them one input is left of what the
    backward began with.
    """

    def backward(**changes: Any) -> int:
        (run,) = estimate_runs(Ask(**ASKED, **changes)).runs
        assert run is not None
        return max(mark.peak for mark in run.simulation.timeline.marks if mark.name == "bwd")

    unit = 2 * TOKENS * WIDTH
    more = backward(transformers_version="4.40.0") - backward(transformers_version="5.0")
    assert unit * (LAYERS - 2) < more < unit * LAYERS


@pytest.mark.torch
def test_reentrant_forwards_keep_no_gathered_weights() -> None:
    """At stage 3 a product keeps its gathered weight in its graph, which a reentrant checkpoint's forward does not make."""
    sharded = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    config = {"zero_optimization": sharded, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2}
    asked = {**ASKED, "engine": "deepspeed", "stage": None, "quantize": "nf4", "micro_batch": None, "ds_config": config}

    def forward(**changes: Any) -> int:
        (run,) = estimate_runs(Ask(**asked, **changes)).runs
        assert run is not None
        return next(mark.allocated for mark in run.simulation.timeline.marks if mark.name == "fwd")

    packed = LAYERS * (2 * WIDTH * WIDTH + 2 * 128 * WIDTH + 3 * 512 * WIDTH) // 2
    assert forward() - forward(reentrant=True) == pytest.approx(packed, rel=0.1)


def test_of_older_and_newer_versions_nothing_is_known() -> None:
    for version in ("4.30", "9.0", "newest"):
        with pytest.raises(BadInput) as refused:
            estimate_report(Ask(**ASKED, transformers_version=version))
        assert refused.value.where == "--transformers-version"


def test_files_say_which_way_of_checkpointing() -> None:
    file = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "gradient_checkpointing": True, "bf16": True}
    assert read_setup(file, "hf-trainer").ask.value("reentrant") is None
    assert read_setup({**file, "use_reentrant": True}, "hf-trainer").ask.value("reentrant") is True
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    assert read_setup({**file, **kwargs}, "hf-trainer").ask.value("reentrant") is False
