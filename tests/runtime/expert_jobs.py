"""Training a small mixture of experts whose experts ranks share, as calls that a pool of four ranks runs."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.mesh_training import CausalStage, Step, is_causal_block, mesh_of, on_samples, on_stages, train_on
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan.trace.tensor_parallel import parallelize

#: Its first block has a plain MLP.
MIXTURE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


class Mixture(Qwen3MoeForCausalLM):
    """A causal language model of transformers that gives its loss."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        loss: torch.Tensor = super().forward(input_ids=tokens, labels=tokens).loss
        return loss


def mixture(seed: int = 0, *, remat: bool = False, **changes: Any) -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(seed)
    model = Mixture(Qwen3MoeConfig(**{**MIXTURE, "loss_type": "ForCausalLM", "num_experts": 4, **changes}))
    if remat:
        model.gradient_checkpointing_enable()
    return model.train()


def share(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Lays the mixture out over ``ep`` and ``tp`` of the mesh, as far as it has them, or over ``ep_tp``."""
    names = tuple(name for name in ("ep", "tp") if _has(mesh, name))
    if _has(mesh, "ep_tp"):
        zeroplan_runtime.share_experts(model, mesh["ep_tp"], partial=sequence, across=mesh["tp"])
    elif "ep" in names:
        zeroplan_runtime.share_experts(model, mesh[names] if len(names) > 1 else mesh["ep"], partial=sequence)
    if "tp" in names:
        parallelize(model, mesh["tp"], sequence=sequence)
    return model


def _has(mesh: DeviceMesh, name: str) -> bool:
    try:
        mesh[name]
    except KeyError:
        return False
    return True


#: A mesh in which ``ep`` is a name for the ranks of ``dp`` and ``cp``.
WIDE = {"dp": 2, "cp": 2}


@functools.cache
def wide_mesh() -> DeviceMesh:
    """A mesh of its own, since the name stays with it."""
    mesh = init_device_mesh("cpu", tuple(WIDE.values()), mesh_dim_names=tuple(WIDE))
    mesh["dp", "cp"]._flatten("ep")
    return mesh


@functools.cache
def across_mesh(*over: str, beside: str = "dp") -> DeviceMesh:
    """A mesh of its own, 2 × 2, whose dimensions `over` share experts, ``tp`` among them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(beside, "tp"))
    mesh[over]._flatten("ep_tp")
    return mesh


def train_shared(
    _group: dist.ProcessGroup,
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]],
    steps: int,
    length: int = models.LENGTH,
) -> list[dict[str, Any]]:
    """Trains for each (config, mesh, model) in turn; ranks of all dimensions but ``tp`` and ``pp`` read other samples.

    The model's option ``sequence`` splits the tokens between the matrices, too. A mesh's entry ``over`` names the dimensions,
    ``tp`` among them, whose ranks have different experts.
    """
    found = []
    for config, sizes, options in cases:
        mesh, model, step, given = laid_out(sizes, length, **options)
        found.append(train_on(mesh, model, config, steps, step, **given))
    return found


def laid_out(
    sizes: dict[str, Any], length: int, *, sequence: bool = False, **options: Any
) -> tuple[DeviceMesh, nn.Module, Step, dict[str, Any]]:
    """The mesh, this rank's part of the mixture, its steps, and further arguments of ``initialize``."""
    over = sizes.get("over", ())
    sizes, sample = {name: size for name, size in sizes.items() if name != "over"}, 0
    mesh = across_mesh(*over, beside=next(iter(sizes))) if over else wide_mesh() if sizes == WIDE else mesh_of(**sizes)
    for name, size in sizes.items():
        sample = sample if name in ("tp", "pp") else sample * size + mesh.get_local_rank(name)
    model = share(mixture(**options), mesh, sequence=sequence)
    if "pp" not in sizes:
        return mesh, model, on_samples(sample, length=length), {}
    stage = CausalStage(model, mesh.get_local_rank("pp"))
    return mesh, stage, on_stages("1F1B", sample, length=length), {"policy": is_causal_block}


def resume_beside(_group: dist.ProcessGroup, folder: str, meshes: list[dict[str, int]]) -> list[float]:
    """On each mesh trains a step, saves, trains one more; resumes other weights at another stage and trains that step again.

    Returns the largest difference of any parameter, for each mesh.
    """
    found = []
    for index, sizes in enumerate(meshes):
        states = []
        for seed, stage in ((0, 2), (1, 3)):
            mesh, model, step, given = laid_out(sizes, 6, seed=seed)
            config = ds_config(stage, gradient_clipping=0.5, gradient_accumulation_steps=2)
            engine, *_ = zeroplan_runtime.initialize(model=model, config=config, mesh=mesh, device="cpu", **given)
            if seed == 0:
                step(engine, 0)
                engine.save_checkpoint(f"{folder}/{index}")
            else:
                engine.load_checkpoint(f"{folder}/{index}")
            step(engine, 1)
            states.append(engine.module_state_dict())
            engine.destroy()
        before, after = states
        found.append(max(float((after[n] - before[n]).abs().max()) for n in before) if before and after else 0.0)
    return found


def refusals(_group: dist.ProcessGroup) -> dict[str, str]:
    """What is said to whoever shares experts as the engine does not."""
    mesh = mesh_of(dp=2, ep=2)

    def run(model: nn.Module, *, mesh: DeviceMesh | None = mesh, **changes: Any) -> None:
        zeroplan_runtime.initialize(model=model, config=ds_config(2, **changes), mesh=mesh, device="cpu")

    def shared() -> nn.Module:
        return zeroplan_runtime.share_experts(mixture(), mesh["ep"])

    tried = {
        "whole": lambda: run(mixture()),
        "no mesh": lambda: run(shared(), mesh=None),
        "width": lambda: zeroplan_runtime.share_experts(mixture(moe_intermediate_size=25), mesh_of(tp=2, ep=2)["tp"]),
        "dimensions": lambda: zeroplan_runtime.share_experts(mixture(), mesh),
        "lamb": lambda: run(shared(), optimizer={"type": "LAMB", "params": {"lr": 1e-3}}),
        "one bit": lambda: run(
            shared(), optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3}}, zero_optimization={"stage": 1}
        ),
        "no experts": lambda: zeroplan_runtime.share_experts(models.make(), mesh["ep"]),
        "twice": lambda: zeroplan_runtime.share_experts(shared(), mesh["ep"]),
        "no tp": lambda: zeroplan_runtime.share_experts(mixture(), across_mesh("tp")["ep_tp"]),
        "not across": lambda: zeroplan_runtime.share_experts(mixture(), mesh["ep"], across=across_mesh("tp")["tp"]),
        "ranks": lambda: run(mixture(), mesh=across_mesh("dp")),
        "group": lambda: zeroplan_runtime.share_experts(mixture(), dist.group.WORLD),  # type: ignore[arg-type]
        "not divided": lambda: zeroplan_runtime.share_experts(mixture(num_experts=6), mesh_of(ep=4)["ep"]),
    }
    said = {}
    for name, act in tried.items():
        try:
            act()
            said[name] = "nothing"
        except BadInput as fault:
            said[name] = str(fault)
    return said


def resume(_group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """Trains four steps on 2 × 2 ranks and saves after the second; resumes on 1 × 2 at another stage, and tries 4 × 1."""
    small = DeviceMesh("cpu", torch.arange(2).view(1, 2), mesh_dim_names=("dp", "ep"))  # every rank makes its groups

    def make(mesh: DeviceMesh, stage: int, seed: int, **changes: Any) -> Any:
        model = zeroplan_runtime.share_experts(mixture(seed), mesh["ep"])
        config = ds_config(stage, gradient_clipping=0.5, **changes)
        return zeroplan_runtime.initialize(model=model, config=config, mesh=mesh, device="cpu")[0]

    engine = make(mesh_of(dp=2, ep=2), 2, 0)
    for number in range(4):
        if number == 2:
            engine.save_checkpoint(folder, client_state={"at": 2})
        engine.backward(engine(models.batch(number, 0, dist.get_rank())))
        engine.step()
    expected = engine.module_state_dict()
    engine.save_16bit_model(folder + "/export")
    engine.destroy()
    said = ""
    try:
        make(mesh_of(ep=4), 2, 1).load_checkpoint(folder)
    except BadInput as fault:
        said = str(fault)
    if small.get_coordinate() is None:
        return {"said": said}
    engine = make(small, 3, 1, gradient_accumulation_steps=2)  # one group reads the samples of two
    _, state = engine.load_checkpoint(folder)
    for number in range(2, 4):
        for group in range(2):
            engine.backward(engine(models.batch(number, 0, 2 * group + dist.get_rank())))
            engine.step()
    found = engine.module_state_dict()
    far = max(float((found[name] - expected[name]).abs().max()) for name in expected) if expected is not None else 0.0
    return {"said": said, "state": state, "far": far, "steps": engine.global_steps}
