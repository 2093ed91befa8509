"""DeepSpeed's Ulysses, AutoTP, PipelineModule and MoE layers on real ranks over NCCL, and what the plans say of them.

``python -m benchmarks.mesh.deepspeed_ranks predict`` keeps the predictions, before any run. On a machine with two GPUs,
``python -m benchmarks.mesh.deepspeed_ranks measure ROWS.jsonl [--only RE] [--tiny]`` measures; ``--tiny`` shrinks models, so
that the program can be tried on CPUs. ``compare ROWS.jsonl [--now]`` holds one against the other.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.mesh.cases import LLAMA
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

PREDICTED = Path(__file__).parent.parent / "results" / "mesh_deepspeed_predicted.json"
SECONDS = 180.0
STEPS = 4
_SHOWN = ("allocated", "reserved", "total")


_WORDY: dict[str, Any] = LLAMA | {"tie_word_embeddings": False, "vocab_size": 128256, "num_hidden_layers": 4}


@dataclass(frozen=True)
class Case:
    """One run on two GPUs of one node: a Llama under DeepSpeed; `seq_len` counts the tokens of a whole sample.

    With `moe`, arguments of ``deepspeed.moe.layer.MoE``, a stack of such layers instead (moe_stack.py).
    """

    id: str
    stage: int
    ulysses: int = 1
    tp: int = 1
    pp: int = 1
    partition: str = "parameters"
    sums: str | None = None  # the dtype in which gradients add up
    micro_batch: int = 1
    seq_len: int = 8192
    grad_accum: int = 1
    checkpointing: bool = False
    together: int = 1  # layers of a stage that are recomputed together
    offloads: bool = False  # checkpointed inputs wait on the host
    one_context: bool = False  # which one context lets them; else each micro batch makes its own, with a stream of its own
    tiled_loss: int = 0
    moe: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(
        default_factory=lambda: LLAMA | {"tie_word_embeddings": False, "max_position_embeddings": 65536}
    )
    gpus: int = 2

    @property
    def zero(self) -> dict[str, Any]:
        """The ds_config's section, whose buckets are small beside the model."""
        return {"stage": self.stage, "reduce_bucket_size": 50_000_000, "overlap_comm": self.stage == 3}

    @property
    def ds_config(self) -> dict[str, Any]:
        """The whole ds_config."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.grad_accum,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True, "fused": True}},
            "zero_optimization": self.zero,
        }
        if self.sums is not None:
            config["data_types"] = {"grad_accum_dtype": self.sums}
        if self.pp > 1:
            config["pipeline"] = {"use_reentrant": False}
        if self.together > 1:
            config["pipeline"]["activation_checkpoint_interval"] = self.together
        return config | ({"tensor_parallel": {"autotp_size": self.tp}} if self.tp > 1 else {})


CASES = (
    Case("U00", stage=2),
    Case("U01", stage=2, ulysses=2),
    Case("U02", stage=3, ulysses=2),
    Case("U03", stage=1, ulysses=2, micro_batch=2, seq_len=4096),
    Case("U04", stage=0, ulysses=2, seq_len=4096),
    Case("U05", stage=2, ulysses=2, checkpointing=True, seq_len=32768),
    Case("U06", stage=3, ulysses=2, checkpointing=True, micro_batch=2, grad_accum=2, seq_len=16384),
    Case("A00", stage=1, tp=2, seq_len=4096),
    Case("A01", stage=2, tp=2, micro_batch=2, seq_len=4096, checkpointing=True),
    Case("P00", stage=0, pp=2, grad_accum=4, seq_len=4096, partition="uniform"),
    Case("P01", stage=1, pp=2, grad_accum=4, seq_len=4096),
    Case("P02", stage=1, pp=2, grad_accum=5, micro_batch=2, seq_len=4096, checkpointing=True, partition="type:decoder"),
    Case("P03", stage=1, pp=2, grad_accum=4, micro_batch=2, seq_len=4096, sums="fp32"),
    Case("P04", stage=1, pp=2, grad_accum=6, seq_len=4096, gpus=4),
    Case("P05", stage=1, pp=2, grad_accum=4, seq_len=4096, model=LLAMA | {"tie_word_embeddings": True}),
    Case("P06", stage=1, pp=2, grad_accum=4, seq_len=4096, checkpointing=True, together=2, partition="type:decoder"),
    Case("K00", stage=2, seq_len=16384, checkpointing=True, offloads=True),
    Case("K01", stage=3, seq_len=16384, checkpointing=True, offloads=True),
    Case("K02", stage=2, seq_len=16384, checkpointing=True),
    Case("K03", stage=2, seq_len=16384, checkpointing=True, offloads=True, one_context=True),
    Case("K04", stage=3, seq_len=16384, checkpointing=True, offloads=True, one_context=True, grad_accum=2),
    Case("X00", stage=2, moe={"num_experts": 8, "ep_size": 2, "k": 2, "capacity_factor": 1.25}, seq_len=4096),
    Case("X01", stage=1, moe={"num_experts": 8, "ep_size": 2, "k": 1}, micro_batch=2, seq_len=4096, grad_accum=2),
    Case("X02", stage=2, moe={"num_experts": 4, "ep_size": 1, "k": 2, "use_residual": True}, seq_len=4096),
    Case("X03", stage=1, moe={"num_experts": 8, "ep_size": 2, "k": 2}, seq_len=4096, sums="fp32"),
    Case("X04", stage=0, moe={"num_experts": 8, "ep_size": 2, "k": 2}, seq_len=4096),
    Case("T00", stage=2, tiled_loss=8, seq_len=8192, model=_WORDY),
    Case("T01", stage=1, tiled_loss=4, seq_len=8192, checkpointing=True, model=_WORDY),
)


def main() -> None:
    """Predict, measure or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("verb", choices=("predict", "measure", "compare"))
    parser.add_argument("rows", type=Path, nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--now", action="store_true")
    parser.add_argument("--histories", type=Path, help="where the recorded events of each rank's allocator go")
    asked = parser.parse_args()
    chosen = [case for case in CASES if re.search(asked.only, case.id)]
    if asked.verb == "predict":
        _predict(chosen)
    elif asked.rows is None:
        parser.error("which rows?")
    elif asked.verb == "measure":
        _measure([_tiny(case) for case in chosen] if asked.tiny else chosen, asked.rows, asked.histories)
    else:
        _compare(chosen, asked.rows, now=asked.now)


def figures(case: Case) -> dict[str, int]:
    """Return what a plan of the case says today, in bytes."""
    if case.moe:
        from benchmarks.mesh.moe_stack import planned

        gpu = planned(case.moe, case.micro_batch, case.seq_len, gpu="H200", gpus=case.gpus, ds_config=case.ds_config)
        return {"allocated": gpu.peak_allocated or 0, "reserved": gpu.peak_reserved or 0, "total": gpu.total or 0}
    request = Ask(
        model=case.model,
        gpu="H200",
        gpus=case.gpus,
        seq_len=case.seq_len,
        gradient_checkpointing=case.checkpointing,
        offload_checkpoints=case.offloads,
        tiled_loss=case.tiled_loss,
        ulysses=case.ulysses,
        pp=case.pp,
        partition=case.partition if case.pp > 1 else None,
        ds_config=case.ds_config,
        depth="simulated",
    )
    plan = estimate_report(request).plans[0]
    if case.pp > 1:  # as of measured ranks, the most of each figure, which need not be one stage's
        return {
            "allocated": max(stage.peak_allocated or 0 for stage in plan.stages),
            "reserved": max(stage.peak_reserved or 0 for stage in plan.stages),
            "total": max(stage.total or 0 for stage in plan.stages),
        }
    gpu, more = plan.gpu, 0
    if case.offloads and not case.one_context:  # on each further stream all that comes back, an input a segment
        returned = (case.model["num_hidden_layers"] - 2) * case.micro_batch * case.seq_len * case.model["hidden_size"] * 2
        more = (STEPS * case.grad_accum - 1) * returned
    return {
        "allocated": gpu.peak_allocated or 0,
        "reserved": (gpu.peak_reserved or 0) + more,
        "total": (gpu.total or 0) + more,
    }


def _predict(cases: list[Case]) -> None:
    kept = json.loads(PREDICTED.read_text())["predictions"] if PREDICTED.exists() else {}
    for case in cases:
        kept[case.id] = figures(case)
        print(case.id, *(f"{kept[case.id][name] / 2**20:.1f}" for name in _SHOWN), flush=True)
    how = "python -m benchmarks.mesh.deepspeed_ranks predict, before any of the cases was measured"
    PREDICTED.write_text(json.dumps({"made_by": how, "predictions": kept}, indent=1) + "\n")


def _compare(cases: list[Case], rows: Path, *, now: bool) -> None:
    measured = {row["id"]: row for row in map(json.loads, rows.read_text().splitlines())}
    kept = json.loads(PREDICTED.read_text())["predictions"]
    for case in cases:
        row = measured.get(case.id, {})
        if not row.get("ok"):
            print(case.id, row.get("fault", "not measured"))
            continue
        told = figures(case) if now else kept[case.id]
        parts = [
            f"{n} {told[n] / 2**20:.1f} / {row[n] / 2**20:.1f} MiB {told[n] / row[n] - 1:+.2%}" for n in _SHOWN if n in row
        ]
        print(case.id, *parts)


def _tiny(case: Case) -> Case:
    small = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "num_hidden_layers": 2}
    return replace(case, model=case.model | small, seq_len=128)


def _measure(cases: list[Case], rows: Path, histories: Path | None) -> None:
    from benchmarks.forked import failure, run_ranks

    done = {json.loads(line)["id"] for line in rows.read_text().splitlines()} if rows.exists() else set()
    for case in cases:
        if case.id in done:
            continue
        began = time.monotonic()
        found = run_ranks(partial(_run_on_rank, case, histories), case.gpus, timeout=SECONDS)
        fault = failure(found)
        row: dict[str, Any] = {
            "id": case.id,
            "case": asdict(case),
            "ok": fault is None,
            "seconds": round(time.monotonic() - began, 1),
        }
        if fault is None:
            most = {name: max(one["value"][name] for one in found) for name in _SHOWN}
            row |= most | {"versions": found[0]["value"]["versions"], "ranks": [one["value"] for one in found]}
        else:
            row["fault"] = fault
        with rows.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(case.id, f"{row['seconds']} s", fault or [f"{row[name] / 2**20:.1f}" for name in _SHOWN], flush=True)


def _run_on_rank(case: Case, histories: Path | None, rank: int) -> dict[str, Any]:
    """Run a case on one rank; the events of its allocator go to a file in `histories`."""
    import torch

    from benchmarks.measure import history

    recorded = histories is not None and torch.cuda.is_available()
    if recorded:
        torch.cuda.set_device(rank)
        history.start(cpp_stacks=False, free_stacks=not case.checkpointing)
    found = _on_rank(case, rank)
    if recorded and histories is not None:
        history.write(history.collect([], {"case": asdict(case), "rank": rank}), histories / f"{case.id}-{rank}.json.gz")
    return found


def _on_rank(case: Case, rank: int) -> dict[str, Any]:
    """Train for some steps on one rank; returns its peaks, and what the card has in use for it at the end, in bytes."""
    import deepspeed
    import torch
    import transformers

    from benchmarks.measure.probe import Device

    card = Device(rank)  # before the process has a context there
    cuda, before = card.cuda, card.used()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)  # ranks that share matrices read the same tokens
    if cuda:
        torch.cuda.set_device(device)
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", verbose=False)
    if case.pp > 1:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "deepspeed": deepspeed.__version__}
        return _measured(_stage_of(case, device), card, before) | {"versions": versions}
    if case.moe:
        from benchmarks.mesh.moe_stack import step_of

        versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
        mixtures = step_of(case.moe, case.micro_batch, case.seq_len, dict(case.ds_config), device)
        return _measured(mixtures, card, before) | {"versions": versions}
    config = transformers.AutoConfig.for_model(**case.model)
    if case.stage == 3:
        import_module("torch._dynamo")  # zero.Init replaces torch.tensor, whose signature dynamo checks when first imported
    whole = (
        torch.device(device)
        if case.stage < 3
        else deepspeed.zero.Init(config_dict_or_path=case.ds_config, dtype=torch.bfloat16)
    )
    with whole:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    model.config.use_cache = False
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.tiled_loss:
        model.forward = partial(_forward_in_tiles, model, case.tiled_loss)
    settings = dict(case.ds_config)
    mpu = None
    if case.ulysses > 1:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=case.ulysses,
            micro_batch_size=case.micro_batch,
            seq_length_is_variable=True,
        )
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters(), mpu=mpu)
    context = _offloading() if case.one_context else None
    tokens = case.seq_len // case.ulysses
    shape = (case.micro_batch, tokens)

    def step() -> float:
        for _ in range(case.grad_accum):
            ids = torch.randint(3, case.model["vocab_size"], shape, device=device)
            batch = {"input_ids": ids, "labels": ids}
            if case.ulysses > 1:
                first = rank % case.ulysses * tokens
                positions = torch.arange(first, first + tokens, device=device).expand(shape).contiguous()
                labels = torch.randint(3, case.model["vocab_size"], shape, device=device)
                batch = {"input_ids": ids, "position_ids": positions, "shift_labels": labels, "labels": labels}
            with context or (_offloading() if case.offloads else nullcontext()):
                loss = engine(**batch).loss
                engine.backward(loss)
            engine.step()
        return float(loss.detach())

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "deepspeed": deepspeed.__version__}
    return _measured(step, card, before) | {"versions": versions}


def _measured(step: Callable[[], float], card: Any, before: int) -> dict[str, Any]:
    """Run the steps; return the peaks, and what the card has in use for this process at the end, in bytes."""
    import torch

    for _ in range(STEPS):
        loss = step()
    return {
        "allocated": torch.cuda.max_memory_allocated() if card.cuda else 0,
        "reserved": torch.cuda.max_memory_reserved() if card.cuda else 0,
        "total": card.used() - before,
        "loss": loss,
    }


def _offloading() -> Any:
    """The context in which checkpointed inputs wait on the host."""
    from deepspeed.runtime.activation_checkpointing import offload_activations

    return offload_activations.get_checkpoint_hidden_states_offloading_ctx_manager()


def _forward_in_tiles(model: Any, tiles: int, input_ids: Any, labels: Any) -> Any:
    """Run the body of a causal language model, and DeepSpeed's tiles of its head and loss."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
    from torch.nn.functional import pad
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def loss_of(whole: Any, hidden: Any, targets: Any) -> Any:
        return whole.loss_function(
            logits=whole.lm_head(hidden), labels=None, vocab_size=whole.config.vocab_size, shift_labels=targets
        )

    hidden = model.model(input_ids=input_ids).last_hidden_state
    shifted = pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    weights = [model.lm_head.weight]
    return CausalLMOutputWithPast(
        loss=TiledFusedLogitsLoss.apply(loss_of, model, hidden, shifted, None, tiles, weights, "mean")
    )


def _stage_of(case: Case, device: Any) -> Callable[[], float]:
    """Return a step of this rank's stage of a PipelineModule."""
    import deepspeed
    import torch
    import transformers

    from zeroplan.engines.deepspeed.trainer_pipeline import pipeline_module

    config = transformers.AutoConfig.for_model(**case.model)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = pipeline_module(whole, case.pp, case.partition, together=case.together if case.checkpointing else 0)
    torch.set_default_dtype(torch.float32)
    engine, *_ = deepspeed.initialize(model=model, config=dict(case.ds_config), model_parameters=model.parameters())

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            ids = torch.randint(3, case.model["vocab_size"], (case.micro_batch, case.seq_len))
            yield ids, ids

    found = batches()
    return lambda: float(engine.train_batch(found))


if __name__ == "__main__":
    main()
