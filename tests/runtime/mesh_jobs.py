"""Training the small models on meshes, as calls that a pool of four ranks runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.mesh_training import (
    CausalChunks,
    CausalStage,
    chunks_on,
    is_causal_block,
    loss_of,
    mesh_of,
    on_samples,
    on_stages,
    train_on,
)
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan.core.pipeline import chunks_of
from zeroplan.core.pipeline_order import schedule_of
from zeroplan.trace.tensor_parallel import parallelize


def split(model: nn.Module, tp: DeviceMesh) -> None:
    """Splits the MLPs, the embedding and the head, none of whose sizes two ranks divide evenly."""
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):  # type: ignore[arg-type]
        plan |= {f"blocks.{i}.up": ColwiseParallel(), f"blocks.{i}.down": RowwiseParallel()}
    parallelize_module(model, tp, plan)


def train_split(
    _group: dist.ProcessGroup, cases: list[tuple[dict[str, Any], dict[str, Any]]], steps: int
) -> list[dict[str, Any]]:
    """Trains on 2 × 2 ranks for each (config, model) in turn: losses, the parameters, the norms and the Arena's rows."""
    mesh = mesh_of(dp=2, tp=2)
    found = []
    for config, options in cases:
        model = models.make(**options)
        split(model, mesh["tp"])
        found.append(train_on(mesh, model, config, steps, on_samples(mesh.get_local_rank("dp"))))
    return found


LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def llama(layers: int = 4) -> nn.Module:
    """A causal language model of transformers that gives its loss, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(LlamaForCausalLM):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            loss: torch.Tensor = super().forward(input_ids=tokens, labels=tokens).loss
            return loss

    torch.manual_seed(0)
    return Llama(LlamaConfig(**{**LLAMA, "num_hidden_layers": layers}, loss_type="ForCausalLM"))


def train_tokens(_group: dist.ProcessGroup, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Trains on 2 × 2 ranks of ``dp`` and ``cp``, each of which sees tokens of its own."""
    mesh = mesh_of(dp=2, cp=2)
    return train_on(mesh, models.make(), config, steps, on_samples(dist.get_rank()))


def train_llama(_group: dist.ProcessGroup, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trains two steps on 2 × 2 ranks by transformers' layout, with split logits; returns losses and the Arena's rows."""
    mesh = mesh_of(dp=2, tp=2)
    found = []
    for number, config in enumerate(configs):
        model = llama()
        parallelize(model, mesh["tp"], sequence=number % 2 == 1)
        found.append(train_on(mesh, model, config, 2, on_samples(mesh.get_local_rank("dp"), length=6)))
    return found


def refusals(_group: dist.ProcessGroup) -> dict[str, str]:
    """What is said to whoever gives a model, a mesh or a batch with which training would go wrong."""
    mesh, rank = mesh_of(dp=2, tp=2), dist.get_rank()
    config = ds_config(2)

    def run(model: nn.Module, *, seen_by: str = "dp", **given: Any) -> Any:
        engine, *_ = zeroplan_runtime.initialize(model=model, **{"config": config, "mesh": mesh, "device": "cpu", **given})
        engine.backward(engine(models.batch(0, 0, mesh.get_local_rank(seen_by))))
        engine.step()

    def split_model(seed: int = 0) -> nn.Module:
        model = models.make(seed, odd=False)
        split(model, mesh["tp"])
        return model

    def dropping() -> nn.Module:
        model = split_model()
        model.drop = nn.Dropout(0.1)  # type: ignore[assignment]
        torch.manual_seed(rank)
        return model

    class Heads(models.Tiny):
        """Each rank uses a whole vector for its own channels alone, and sums over the ranks."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.blocks[0].up.register_forward_hook(lambda _m, _x, y: y * self.scale[: y.shape[-1]])
            return super().forward(tokens)

    def part_of_heads() -> nn.Module:
        torch.manual_seed(0)
        model = Heads(odd=False)
        model.scale = nn.Parameter(torch.ones(16))
        split(model, mesh["tp"])
        return model

    def split_tokens() -> None:
        model: Any = llama()
        model.gradient_checkpointing_enable()
        parallelize(model.train(), mesh["tp"], sequence=True)
        parts = {**config, "activation_checkpointing": {"partition_activations": True}}
        engine, *_ = zeroplan_runtime.initialize(model=model, config=parts, mesh=mesh, device="cpu")
        tokens = models.batch(0, 0, mesh.get_local_rank("dp"))[:, :6]
        with loss_parallel():
            engine(tokens)

    lamb = {**config, "optimizer": {"type": "LAMB", "params": {"lr": 1e-3}}}
    tried = {
        "no mesh": lambda: run(split_model(), mesh=None),
        "another mesh": lambda: run(split_model(), mesh=mesh_of(dp=1, tp=4)),
        "sharded": lambda: run(fully_shard(models.make(odd=False), mesh=mesh["dp"])),
        "seeds": lambda: run(split_model(seed=rank)),
        "dropout": lambda: run(dropping()),
        "inputs": lambda: run(split_model(), seen_by="tp"),
        "part of heads": lambda: run(part_of_heads()),
        "split tokens": split_tokens,
        "lamb": lambda: run(split_model(), config=lamb),
        "compiled": lambda: zeroplan_runtime.compile_blocks(split_model()),
        "names": lambda: run(models.make(), mesh=init_device_mesh("cpu", (2, 2))),
        "unknown": lambda: run(models.make(), mesh=mesh_of(dp=2, rows=2)),
        "both": lambda: run(models.make(), group=dist.group.WORLD),
    }
    return {name: _said(act) for name, act in tried.items()}


def resume(_group: dist.ProcessGroup, folder: str) -> dict[str, Any] | None:
    """Trains four steps on 2 × 2 ranks and saves after the second; resumes on 1 × 2 at another stage, and tries 4 × 1."""
    config = ds_config(2, gradient_clipping=0.5)
    small = DeviceMesh("cpu", torch.arange(2).view(1, 2), mesh_dim_names=("dp", "tp"))  # every rank makes its groups

    def make(mesh: DeviceMesh, stage: int, seed: int) -> Any:
        model = models.make(seed, odd=False)
        if mesh.size(1) > 1:
            split(model, mesh["tp"])
        changed = {**config, "zero_optimization": {"stage": stage}}
        return zeroplan_runtime.initialize(model=model, config=changed, mesh=mesh, device="cpu")[0]

    mesh = mesh_of(dp=2, tp=2)
    engine = make(mesh, 2, 0)
    for number in range(4):
        if number == 2:
            engine.save_checkpoint(folder, client_state={"at": 2})
        engine.backward(engine(models.batch(number, 0, mesh.get_local_rank("dp"))))
        engine.step()
    expected = engine.module_state_dict()
    engine.save_16bit_model(folder + "/export")
    engine.destroy()
    said = ""
    try:
        make(mesh_of(dp=4, tp=1), 2, 1).load_checkpoint(folder)
    except BadInput as fault:
        said = str(fault)
    if small.get_coordinate() is None:
        return None
    config["gradient_accumulation_steps"] = 2  # one rank reads both samples of a step
    engine = make(small, 3, 1)
    _, state = engine.load_checkpoint(folder)
    for number in range(2, 4):
        for rank in range(2):
            engine.backward(engine(models.batch(number, 0, rank)))
            engine.step()
    found = engine.module_state_dict()
    far = max(float((found[name] - expected[name]).abs().max()) for name in expected) if expected is not None else 0.0
    return {"said": said, "state": state, "far": far, "steps": engine.global_steps}


class Stage(nn.Module):
    """A stage of :class:`models.Tiny`: its half of the blocks, with the embedding or the norm and the head."""

    def __init__(self, whole: models.Tiny, index: int) -> None:
        super().__init__()
        half = len(whole.blocks) // 2
        first, end = (0, half) if index == 0 else (half, len(whole.blocks))
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in range(first, end)})  # keeps the whole model's names
        if index == 0:
            self.embed = whole.embed
        else:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embed"):
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)).float() if hasattr(self, "head") else x


class Chunks(nn.Module):
    """Stages of :class:`models.Tiny`, all of one rank's, under the whole model's names. Each has the blocks between two of
    `ends`, here of unequal depth.
    """

    def __init__(self, whole: models.Tiny, indices: tuple[int, ...], ends: Sequence[int] = (0, 1, 3, 4, 5)) -> None:
        super().__init__()
        self.parts = [[str(i) for i in range(ends[index], ends[index + 1])] for index in indices]
        self.blocks = nn.ModuleDict({i: whole.blocks[int(i)] for part in self.parts for i in part})
        last = len(ends) - 2
        self.ends = [(index == 0, index == last) for index in indices]
        if 0 in indices:
            self.embed = whole.embed
        if last in indices:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor, chunk: int) -> torch.Tensor:
        first, last = self.ends[chunk]
        if first:
            x = self.embed(x)
        for i in self.parts[chunk]:
            x = self.blocks[i](x)
        return self.head(self.norm(x)).float() if last else x


def train_pipeline(_group: dist.ProcessGroup, cases: list[tuple[str, dict[str, Any]]], steps: int) -> list[dict[str, Any]]:
    """Trains on two stages × two data-parallel ranks for each (schedule, config); each stage's losses and parameters.

    The schedule "split" is 1F1B on two stages × two tensor-parallel ranks, which see the first data-parallel rank's samples.
    """
    found = []
    for kind, config in cases:
        mesh = mesh_of(pp=2, tp=2) if kind == "split" else mesh_of(pp=2, dp=2)
        index, sample = mesh.get_local_rank("pp"), 0 if kind == "split" else mesh.get_local_rank("dp")
        whole, indices = models.make(odd=kind != "split"), chunks_on(kind, index)
        model = Stage(whole, index) if len(indices) == 1 else Chunks(whole, indices)
        if kind == "split":
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in model.blocks.values():
                parallelize_module(block, mesh["tp"], styles)
        policy = lambda name, _module: name.startswith("blocks.") and name.count(".") == 1  # noqa: E731
        step = on_stages("1F1B" if kind == "split" else kind, sample)
        found.append(train_on(mesh, model, config, steps, step, policy=policy))
    return found


def train_eight_stages(_group: dist.ProcessGroup, cases: list[tuple[str, dict[str, Any]]], steps: int) -> list[dict[str, Any]]:
    """Trains a model of nine blocks on four ranks of two chunks for each (schedule, config)."""
    mesh, found = mesh_of(pp=4), []
    policy = lambda name, _module: name.startswith("blocks.") and name.count(".") == 1  # noqa: E731
    for kind, config in cases:
        indices = chunks_on(kind, mesh.get_local_rank("pp"), 4)
        model = Chunks(models.make(depth=9), indices, (0, 1, 2, 3, 4, 5, 6, 7, 9))
        found.append(train_on(mesh, model, config, steps, on_stages(kind, 0), policy=policy))
    return found


def train_stages(
    _group: dist.ProcessGroup, configs: list[dict[str, Any]], backend: str = "", steps: int = 1, kind: str = "1F1B"
) -> list[dict[str, Any]]:
    """Trains the Llama on two stages × two data-parallel ranks for each config, its blocks compiled if a backend is given."""
    mesh, found = mesh_of(pp=2, dp=2), []
    for config in configs:
        model = CausalStage(llama(), mesh.get_local_rank("pp"))
        if backend:
            zeroplan_runtime.compile_blocks(model, policy=is_causal_block, backend=backend)
        step = on_stages(kind, mesh.get_local_rank("dp"), length=6)
        found.append(train_on(mesh, model, config, steps, step, policy=is_causal_block))
    return found


#: Schedules of two chunks a rank, by what the planner calls them and what torch does.
OF_CHUNKS = {
    "1f1b": "Interleaved1F1B",
    "gpipe": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble*2",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def train_chunks(_group: dist.ProcessGroup, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Trains a Llama of six blocks on two ranks of two chunks × two data-parallel ranks, for each (schedule, config)."""
    mesh, found = mesh_of(pp=2, dp=2), []
    for name, config in cases:
        stages = chunks_of(6, 2, 2, mesh.get_local_rank("pp"), schedule_of(name))
        step = on_stages(OF_CHUNKS[name], mesh.get_local_rank("dp"), length=6)
        found.append(train_on(mesh, CausalChunks(llama(6), stages), config, 1, step, policy=is_causal_block))
    return found


def hands_on(_group: dist.ProcessGroup) -> dict[str, Any]:
    """What a user's own reads and writes of split parameters find, at stages 2 and 3, with an optimizer of torch's."""
    mesh, found = mesh_of(dp=2, tp=2), {}
    for stage in (2, 3):
        model = models.make(odd=False)
        split(model, mesh["tp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine, *_ = zeroplan_runtime.initialize(
            model=model, config=ds_config(stage, "bf16"), mesh=mesh, device="cpu", optimizer=optimizer
        )

        def step(number: int, engine: Any = engine) -> None:
            engine.backward(engine(models.batch(number, 0, mesh.get_local_rank("dp"))))
            engine.step()

        weight: Any = model.blocks[1].up.weight
        step(0)
        step(1)
        tried = {
            "local": lambda weight=weight: weight.to_local() + 0,
            "whole": lambda weight=weight: weight.full_tensor(),
            "product": lambda weight=weight: weight * 2,
        }
        engine.backward(engine(models.batch(2, 0, mesh.get_local_rank("dp"))))
        tried["clip"] = lambda model=model: nn.utils.clip_grad_norm_(model.blocks[1].up.parameters(), 1.0)
        for name, act in tried.items():
            try:
                value = act()
                found[stage, name] = value.shape
            except BadInput as fault:
                found[stage, name] = str(fault)
        engine.step()
        with engine.gathered("blocks.1"), torch.no_grad():
            weight.fill_(0.25)
        state = engine.module_state_dict()
        found[stage, "written"] = None if state is None else bool((state["blocks.1.up.weight"] == 0.25).all())
        step(3)  # the master was written, too, so that one step leaves it near
        state = engine.module_state_dict()
        found[stage, "kept"] = None if state is None else float((state["blocks.1.up.weight"] - 0.25).abs().max())
        engine.destroy(keep_parameters=True)
        found[stage, "left"] = tuple(weight.full_tensor().shape)
    return found


def stage_refusals(_group: dist.ProcessGroup) -> dict[str, str]:
    """What is said of batches and schedules with which a pipeline would train wrong; nothing is sent between the stages."""
    mesh = mesh_of(pp=2, dp=2)

    def made(
        accumulation: int = 2, *, stage: int = 1, checkpointed: bool = False, compiled: bool = False, chunks: bool = False
    ) -> Any:
        config, place = ds_config(stage, gradient_accumulation_steps=accumulation), mesh.get_local_rank("pp")
        model: Any = Chunks(models.make(), (place, 3 - place)) if chunks else Stage(models.make(), place)
        model.gradient_checkpointing = checkpointed
        if compiled:
            policy = lambda name, _module: name.startswith("blocks.") and name.count(".") == 1  # noqa: E731
            zeroplan_runtime.compile_blocks(model, policy=policy, backend="eager")
        return zeroplan_runtime.initialize(model=model, config=config, mesh=mesh, device="cpu")[0]

    def give(rows: int, *, first: bool = True, second: bool = True) -> None:
        schedule, tokens = made().pipeline_schedule("GPipe", loss_of), models.batch(0, 0, 0)[:rows]
        if mesh.get_local_rank("pp") == 0:
            schedule.step(*([tokens] if first else []))
        else:
            schedule.step(target=tokens if second else None)

    def change() -> None:
        schedule, tokens = made().pipeline_schedule("GPipe", loss_of), models.batch(0, 0, 0)[:2]
        for given in (tokens, tokens[:, :5]):
            _ = schedule.step(given) if mesh.get_local_rank("pp") == 0 else schedule.step(target=given)

    tried = {
        "uneven": lambda: give(3),
        "empty": lambda: give(0),
        "nothing": lambda: give(2, first=False, second=False),
        "changed": change,
        "few": lambda: made(1).pipeline_schedule("1F1B", loss_of),
        "rounds": lambda: made(5).pipeline_schedule("InterleavedZeroBubble", loss_of),
        "gathered": lambda: made(stage=3).pipeline_schedule("InterleavedZeroBubble", loss_of),
        "again": lambda: made(checkpointed=True).pipeline_schedule("InterleavedZeroBubble", loss_of),
        "compiled": lambda: made(compiled=True).pipeline_schedule("InterleavedZeroBubble", loss_of),
        "folded": lambda: made(4).pipeline_schedule("ZBVZeroBubble", loss_of),
        "looped": lambda: made(4).pipeline_schedule("Interleaved1F1B", loss_of),
        "one": lambda: made(4).pipeline_schedule("1F1B", loss_of, chunks=2),
        "no chunks": lambda: made(4).pipeline_schedule("Interleaved1F1B", loss_of, chunks=2),
        "turns": lambda: made(5, chunks=True).pipeline_schedule("Interleaved1F1B", loss_of, chunks=2),
        "fewer": lambda: made(3, chunks=True).pipeline_schedule("DualPipeV", loss_of, chunks=2),
        "gathered halves": lambda: made(4, chunks=True, stage=3).pipeline_schedule("ZBVZeroBubble", loss_of, chunks=2),
        "unknown": lambda: made().pipeline_schedule("Zigzag", loss_of),
        "no loss": lambda: made().pipeline_schedule("GPipe", "mean"),
    }
    return {name: _said(act) for name, act in tried.items()}


def _said(act: Callable[[], Any]) -> str:
    try:
        act()
    except BadInput as fault:
        return str(fault)
    return "nothing"


def cut_otherwise(_group: dist.ProcessGroup, folder: str) -> str:
    """Saves matrices that are split by columns of outputs, and loads them where they are split by columns of inputs."""
    mesh = mesh_of(dp=2, tp=2)

    def made(up: Any, down: Any) -> Any:
        model = models.make(odd=False)
        plan = {f"blocks.{i}.{name}": style for i in range(5) for name, style in (("up", up), ("down", down))}
        parallelize_module(model, mesh["tp"], plan)
        return zeroplan_runtime.initialize(model=model, config=ds_config(2), mesh=mesh, device="cpu")[0]

    made(ColwiseParallel(), RowwiseParallel()).save_checkpoint(folder)
    whole = {"output_layouts": Replicate()}
    return _said(lambda: made(RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(**whole)).load_checkpoint(folder))


def resume_pipeline(_group: dist.ProcessGroup, folder: str) -> float:
    """Saves two stages after a step, and loads them into other weights at another stage of ZeRO: the largest difference."""
    mesh = mesh_of(pp=2, dp=2)
    index, states = mesh.get_local_rank("pp"), []
    for seed, stage in ((0, 2), (1, 3)):
        engine, *_ = zeroplan_runtime.initialize(
            model=Stage(models.make(seed), index), config=ds_config(stage), mesh=mesh, device="cpu"
        )
        if seed == 0:
            schedule = engine.pipeline_schedule("GPipe", loss_of)
            tokens = models.batch(0, 0, mesh.get_local_rank("dp"))
            _ = schedule.step(tokens) if index == 0 else schedule.step(target=tokens)
            engine.step()
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        states.append(engine.module_state_dict())
        engine.destroy()
    before, after = states
    if before is None or after is None:
        return 0.0 if mesh.get_local_rank("dp") else 1.0  # the first rank of each stage has the weights
    return max(float((after[name] - before[name]).abs().max()) for name in before)
