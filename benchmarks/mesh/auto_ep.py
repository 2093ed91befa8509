"""DeepSpeed's AutoEP on one rank of eight, whose others are fake, and on two real ranks, and what the plans say of it.

``python -m benchmarks.mesh.auto_ep predict`` keeps the predictions, before any run. ``measure ROWS.jsonl [--only RE] [--tiny]``
measures the cases of one GPU, with ``--two-gpus`` those over NCCL; ``--tiny`` shrinks models, so that the program can be tried
on a CPU. ``compare ROWS.jsonl [--now]`` holds one against the other.

Routers spread tokens evenly here, which is the case that is planned: each is told which experts its tokens take, in place.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.mesh.cases import QWEN3_MOE
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

MEASURED = Path(__file__).parent.parent / "results" / "mesh_auto_ep.jsonl"
PREDICTED = Path(__file__).parent.parent / "results" / "mesh_auto_ep_predicted.json"
SECONDS = 120.0
STEPS = 4
_SHOWN = ("allocated", "reserved", "total")
_QWEN3 = QWEN3_MOE | {"tie_word_embeddings": False, "num_hidden_layers": 12}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
QWEN2_MOE: dict[str, Any] = _QWEN3 | {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 2048,
}


@dataclass(frozen=True)
class Case:
    """One run of a mixture under DeepSpeed with AutoEP, on `ranks` of which `ep` share the experts."""

    id: str
    stage: int
    ep: int
    ranks: int = 8
    micro_batch: int = 2
    seq_len: int = 2048
    grad_accum: int = 1
    checkpointing: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: _QWEN3)

    @property
    def ds_config(self) -> dict[str, Any]:
        """The whole ds_config, whose buckets are small beside the model."""
        section = {"stage": self.stage, "reduce_bucket_size": 20_000_000, "overlap_comm": self.stage == 3}
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.grad_accum,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True, "fused": True}},
            "zero_optimization": section | self.zero,
            "expert_parallel": {"enabled": True, "autoep_size": self.ep},
        }


CASES = (
    Case("W00", stage=2, ep=4),
    Case("W01", stage=1, ep=8, checkpointing=True),
    Case("W02", stage=3, ep=2),
    Case("W03", stage=0, ep=4, model=QWEN2_MOE),
    Case("W04", stage=3, ep=8, checkpointing=True, grad_accum=2, model=MIXTRAL),
    Case("W05", stage=2, ep=1, micro_batch=1, grad_accum=2, model=MIXTRAL),
)
TWO_GPUS = (
    Case("Y00", stage=2, ep=2, ranks=2),
    Case("Y01", stage=3, ep=2, ranks=2, checkpointing=True),
    Case("Y02", stage=1, ep=1, ranks=2, micro_batch=1),
    Case("Y03", stage=2, ep=2, ranks=2, grad_accum=2, model=QWEN2_MOE),
)


def main() -> None:
    """Predict, measure or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("verb", choices=("predict", "measure", "compare"))
    parser.add_argument("rows", type=Path, nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--two-gpus", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--now", action="store_true")
    asked = parser.parse_args()
    chosen = [case for case in (*CASES, *TWO_GPUS) if re.search(asked.only, case.id)]
    if asked.verb == "predict":
        _predict(chosen)
    elif asked.rows is None:
        parser.error("which rows?")
    elif asked.verb == "measure":
        here = [case for case in chosen if (case in TWO_GPUS) == asked.two_gpus]
        _measure([_tiny(case) for case in here] if asked.tiny else here, asked.rows, fake=not asked.two_gpus)
    else:
        _compare(chosen, asked.rows, now=asked.now)


def figures(case: Case, *, measured_rank: bool = False) -> dict[str, int]:
    """Return what a plan of the case says today, in bytes: of its worst rank, or of that which was measured among fake ones."""
    request = Ask(
        model=case.model,
        gpu="H200",
        gpus=case.ranks,
        seq_len=case.seq_len,
        gradient_checkpointing=case.checkpointing,
        ds_config=case.ds_config,
        depth="simulated",
    )
    if measured_rank and case in CASES:
        return _of_first_rank(request)
    gpu = estimate_report(request).plans[0].gpu
    return {"allocated": gpu.peak_allocated or 0, "reserved": gpu.peak_reserved or 0, "total": gpu.total or 0}


def _of_first_rank(request: Ask) -> dict[str, int]:
    from zeroplan.engines.deepspeed.job import rank_of
    from zeroplan.engines.deepspeed.schedule import record_deepspeed
    from zeroplan.planner.resolve import resolve
    from zeroplan.planner.tapes import expanded_tape_of
    from zeroplan.simulate.recorder import simulate

    resolved = resolve(request)
    case = resolved.cases[0]
    tape = expanded_tape_of(resolved.engine, case)
    run = simulate(record_deepspeed(rank_of(case, tape.parameters), tape), None, device_memory=case.cluster.vram)
    return {"allocated": run.peak_allocated, "reserved": run.peak_reserved}


def _predict(cases: list[Case]) -> None:
    kept = json.loads(PREDICTED.read_text())["predictions"] if PREDICTED.exists() else {}
    for case in cases:
        kept[case.id] = figures(case)
        print(case.id, *(f"{kept[case.id][name] / 2**20:.1f}" for name in _SHOWN), flush=True)
    how = "python -m benchmarks.mesh.auto_ep predict, before any of the cases was measured"
    PREDICTED.write_text(json.dumps({"made_by": how, "predictions": kept}, indent=1) + "\n")


def _compare(cases: list[Case], rows: Path, *, now: bool) -> None:
    measured = {row["id"]: row for row in map(json.loads, rows.read_text().splitlines())}
    kept = json.loads(PREDICTED.read_text())["predictions"]
    for case in cases:
        row = measured.get(case.id, {})
        if not row.get("ok"):
            print(case.id, row.get("fault", "not measured"))
            continue
        told = figures(case, measured_rank=True) if now else kept[case.id]
        parts = [
            f"{n} {told[n] / 2**20:.1f} / {row[n] / 2**20:.1f} MiB {told[n] / row[n] - 1:+.2%}"
            for n in _SHOWN
            if n in row and n in told
        ]
        print(case.id, *parts)


def _tiny(case: Case) -> Case:
    small = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "num_hidden_layers": 2, "head_dim": 8}
    width = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    return replace(case, model=case.model | small | width, seq_len=128)


def _measure(cases: list[Case], rows: Path, *, fake: bool) -> None:
    from benchmarks.forked import failure, run_ranks

    done = {json.loads(line)["id"] for line in rows.read_text().splitlines()} if rows.exists() else set()
    for case in cases:
        if case.id in done:
            continue
        began = time.monotonic()
        found = run_ranks(partial(_on_rank, case, fake), 1 if fake else case.ranks, timeout=SECONDS)
        fault = failure(found)
        row: dict[str, Any] = {
            "id": case.id,
            "case": asdict(case),
            "ok": fault is None,
            "seconds": round(time.monotonic() - began, 1),
        }
        if fault is None:
            values = [one["value"] for one in found]
            row |= {name: max(value[name] for value in values) for name in _SHOWN if name in values[0]}
            row |= {"versions": values[0]["versions"], "ranks": values}
        else:
            row["fault"] = fault
        with rows.open("a") as out:
            out.write(json.dumps(row) + "\n")
        shown = [f"{row[name] / 2**20:.1f}" for name in _SHOWN if name in row]
        print(case.id, f"{row['seconds']} s", fault or shown, flush=True)


def _on_rank(case: Case, fake: bool, rank: int) -> dict[str, Any]:
    """Train for some steps on one rank; returns its peaks and what is live, in bytes, after each part of a step."""
    import deepspeed
    import torch
    import transformers

    from benchmarks.measure.probe import Device
    from zeroplan.engines.deepspeed.trainer_mesh import spread_evenly

    card = Device(rank)  # before the process has a context there
    cuda, before = card.cuda, card.used()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.manual_seed(rank)
    if cuda:
        torch.cuda.set_device(device)
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    if fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", verbose=False)
    config = transformers.AutoConfig.for_model(**case.model)
    made = deepspeed.zero.Init(config_dict_or_path=case.ds_config, dtype=torch.bfloat16) if case.stage == 3 else nullcontext()
    if case.stage == 3:
        import_module("torch._dynamo")  # zero.Init replaces torch.tensor, whose signature dynamo checks when first imported
    with made:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    model.config.use_cache = False
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    own = filter(lambda p: p.requires_grad, model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=dict(case.ds_config), model_parameters=own)
    spread_evenly(engine)
    marks: list[dict[str, Any]] = []

    def mark(name: str) -> None:
        if cuda:
            marks.append({"mark": name, "allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()})

    def step() -> float:
        for _ in range(case.grad_accum):
            ids = torch.randint(3, case.model["vocab_size"], (case.micro_batch, case.seq_len), device=device)
            loss = engine(input_ids=ids, labels=ids).loss
            mark("forward")
            engine.backward(loss)
            mark("backward")
            engine.step()
            mark("step")
        return float(loss.detach())

    mark("init")
    with _alone() if fake else nullcontext():
        for _ in range(STEPS):
            loss = step()
    found: dict[str, Any] = {
        "allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved": torch.cuda.max_memory_reserved() if cuda else 0,
        "loss": loss if loss == loss else None,
        "marks": marks,
        "versions": {one.__name__: one.__version__ for one in (torch, transformers, deepspeed)},
    }
    return found if fake else found | {"total": card.used() - before}


@contextmanager
def _alone() -> Iterator[None]:
    """Let a rank train whose others are fake: it receives what it sends, and steps although gathered weights are anything."""
    from deepspeed.module_inject import auto_ep_layer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    def received(output: Any, sent: Any, **kwargs: Any) -> None:
        output.copy_(sent)

    applied = mock.patch.object(DeepSpeedZeroOptimizer_Stage3, "_loss_scale_update_and_overflow_cleanup", return_value=False)
    with applied, mock.patch.object(auto_ep_layer.dist, "all_to_all_single", received):
        yield


if __name__ == "__main__":
    main()
