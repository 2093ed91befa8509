"""Holds modelled times of layouts against published runs: ``python -m benchmarks.layouts.published``.

``published.jsonl`` holds a run a line: source and table, tokens a second and GPU, model, cluster, network, degrees, batch.
Where a source gives operations a second, they were divided by the operations a token that it counts; `note` says so, and what
a source leaves open. A model that is given by its shape is a Llama of the same hidden size, depth, vocabulary and elements a
block. Rows marked `blind` were drawn by lot (seed 20261124) before the first change to the model of time, and no change was
made for their sake. What software a source says that it ran was added to rows of both halves when the model learned to tell it:
`engine`; `arguments`, Megatron's own; `hides_exchange`, experts' exchanges run beside another micro batch; `layers`, whose
layers; `shared_as`, the way in which ranks share work where stages are uneven; `overlap`, `attn`; `compile`, where a plan has
such graphs; `played_as`, the schedule that is played where no plan has the run's (DeepSeek-V3's ranks hold two stages, and
feed micro batches from both ends, so that they wait as those of DualPipeV do, deepseek-ai/DualPipe's README);
`lacks`, what the software of its day had not, so that the best is looked for without it, too;
`card` and `vram`, figures of a card unlike its preset; `sync_each`, gradients are reduced after each micro batch (Composer
leaves that out for DDP alone: composer/distributed/dist_strategy.py, ddp_sync_context).

``--memory`` plans each run's memory in place of its time. All of them ran, so that "does not fit" is wrong, or of another run:
a Llama that stands for a shape keeps other activations than the model that ran, and what ran in 8 bits is planned in bf16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.rates import rates_of
from zeroplan.engines.megatron.bridge import model_of, staged
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.models.megatron import MODEL_TYPE
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.search.layout_counts import rank_counts
from zeroplan.search.layout_orders import without_degrees
from zeroplan.search.layout_time import LayoutCost, LayoutTime
from zeroplan.search.layouts import search_layouts

ROWS = Path(__file__).with_name("published.jsonl")
#: Within these a prediction counts as right, over published speed.
LOW, HIGH = 0.8, 1.25
_DEGREES = ("tp", "sp", "cp", "pp", "vpp", "ep", "dp_replicate")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run and its modelled time; `refused` says why there is none."""

    row: dict[str, Any]
    time: LayoutTime | None
    refused: str = ""

    @property
    def predicted(self) -> float | None:
        """Modelled tokens a second and GPU."""
        return None if self.time is None else self.time.tokens_per_second / (self.row["gpus"] * self.row["nodes"])

    @property
    def ratio(self) -> float | None:
        """Predicted over published speed."""
        return None if self.predicted is None else self.predicted / self.row["tokens"]


def rows() -> list[dict[str, Any]]:
    """Return the published runs in the order of their file."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def request_of(row: dict[str, Any], *, by_name: bool = False) -> Ask:
    """Return a run as a request; `by_name` leaves a named model without Megatron's arguments, which fix its uneven stages."""
    named = isinstance(row["model"], str)
    if _runs_megatron(row) and not (by_name and named):
        model = _megatron(row)
    else:
        model = row["model"] if named else _llama(row["model"])
    asked: dict[str, Any] = {name: row[name] for name in _DEGREES if name in row}
    if "checkpointing" in row:
        asked |= {"gradient_checkpointing": True, "checkpoint_policy": row["checkpointing"]}
    sizes = {name: row[name] for name in ("gpus", "nodes", "gpu", "seq_len", "micro_batch", "grad_accum", "stage")}
    asked |= {name: row[name] for name in ("attn", "sync_each", "vram", "reduce_dtype", "compile") if name in row}
    if "fp8" in row and row.get("engine") == "megatron":
        asked["fp8"] = row["fp8"]
    return Ask(model=model, engine=row.get("engine", "fsdp2"), network=row.get("network"), **sizes, **asked)


def _runs_megatron(row: dict[str, Any]) -> bool:
    return row.get("engine") == "megatron"


def _megatron(row: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's arguments of a run: its GPT of a shape, or its form of a model of transformers, with the row's own."""
    shape = row["model"]
    if isinstance(shape, str):
        spec = load_model(shape)
        made = model_of(spec.model_type, spec.config)
        assert made is not None, "rows name architectures that Megatron has"
        made, _ = staged(made, ParallelLayout(gpus=row.get("pp", 1), pp=row.get("pp", 1), vpp=row.get("vpp", 1)))
        found = {name: value for name, value in asdict(made).items() if value not in ((), "")}
    else:
        found = {
            "num_layers": shape["layers"],
            "hidden_size": shape["hidden"],
            "num_attention_heads": shape["heads"],
            "vocab_size": shape["vocab"],
            "max_position_embeddings": row["seq_len"],
        }
    arguments: dict[str, Any] = row.get("arguments", {})
    return {"model_type": MODEL_TYPE, **found, **arguments}


def _llama(shape: dict[str, int]) -> dict[str, Any]:
    """Return the config of a Llama whose blocks have as many elements as those of a GPT: 12 times the hidden size squared."""
    width, heads = shape["hidden"], shape["heads"]
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 8 * width // 3 // 64 * 64,
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": shape["vocab"],
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    }


def _neox(shape: dict[str, int]) -> dict[str, Any]:
    """Return the config of a GPT-NeoX of a shape, whose memory stands for MosaicML's MPT: one GELU in an MLP, norms that take
    means away. That it turns a quarter of each head's channels remains.
    """
    own = {"intermediate_size": 4 * shape["hidden"], "use_parallel_residual": False, "rotary_pct": 0.25, "hidden_act": "gelu"}
    llama = _llama(shape)
    del llama["num_key_value_heads"]
    return llama | own | {"model_type": "gpt_neox", "tie_word_embeddings": True}


def model(row: dict[str, Any]) -> LayoutTime:
    """Return the modelled time of a run.

    Raises:
        BadInput: what cannot be planned.
    """
    resolved = resolve(request_of(row))
    layers = find_engine(row["layers"]) if "layers" in row else resolved.engine
    counts = rank_counts(replace(resolved, engine=layers), {})
    sharing = (find_engine(row["shared_as"]) if "shared_as" in row else resolved.engine).sharing(resolved.cases[0])
    if "shared_as" in row:  # stages that blocks alone do not divide: embedding and head count as a block each
        sharing = replace(sharing, even_stages=False)
    if not row.get("overlap", True):
        sharing = replace(sharing, overlaps=False, pipelines_tensor=False)
    sharing = replace(sharing, hides_exchange=row.get("hides_exchange", False))
    if row.get("compiled") or row.get("tp", 1) > 1:  # torchtitan's were compiled, others' layers are no DTensors
        sharing = replace(sharing, dispatches=False)
    case = resolved.cases[0]
    if "fp8" in row and not _runs_megatron(row):
        case = replace(case, workload=case.workload.with_techniques(Float8Recipe.TENSORWISE))  # all recipes have one rate
    if "played_as" in row:
        case = replace(case, pipeline=row["played_as"], parallel=replace(case.layout, vpp=2))
    cluster = case.cluster
    gpu = replace(cluster.gpu, **row.get("card", {}))
    return LayoutCost(case, counts, rates_of(gpu, cluster.network, cluster.gpus), resolved.engine, sharing).time()


def outcomes(only: str = "") -> Iterator[Outcome]:
    """Model the runs whose source or name contains `only`."""
    for row in rows():
        if only.lower() in f"{row['source']} {row['name']}".lower():
            try:
                yield Outcome(row, model(row))
            except BadInput as error:
                yield Outcome(row, None, str(error))


def verdict(row: dict[str, Any]) -> str:
    """Return the verdict of a run's plan, and what its worst rank allocates and reserves."""
    try:
        asked = request_of(row).replace(from_scratch=True)
        if isinstance(asked.model, dict) and asked.model["model_type"] == "llama" and asked.tp == asked.pp == 1:
            asked = asked.replace(model=_neox(row["model"]))
        plan = estimate_report(asked).plans[0]
    except BadInput as error:
        return f"refused: {error}"
    said, gib = plan.verdict, 2.0**30
    if plan.gpu.peak_allocated is None or plan.gpu.peak_reserved is None:
        return f"{said}"
    return f"{said}: {plan.gpu.peak_allocated / gib:.1f} GiB allocated, {plan.gpu.peak_reserved / gib:.1f} reserved"


def memory(only: str) -> None:
    """Print the verdicts of the runs whose source or name contains `only`, and how many there are of each."""
    counted: dict[str, int] = {}
    print("| run | planned | verdict |\n|---|---|---|")
    for row in rows():
        if only.lower() in f"{row['source']} {row['name']}".lower():
            said = verdict(row)
            itself = isinstance(row["model"], str) or _runs_megatron(row)
            kind = "itself" if itself else "stand-in"
            if "fp8" in row and not _runs_megatron(row):
                kind = "in bf16 for 8 bits"
            print(f"| {row['name']} | {kind} | {said} |", flush=True)
            group = f"{kind}: {said.partition(':')[0]}"
            counted[group] = counted.get(group, 0) + 1
    print("\n" + ", ".join(f"{count} × {group}" for group, count in sorted(counted.items())))


def against_best(row: dict[str, Any]) -> dict[str, Any]:
    """Return the time of a run's layout over that of the layout which the search names, of as many sequences a step.

    Both are planned as the engine runs usually, with the run's micro batch; 8 bits where the engine's layouts know them. No
    run's software kept just what products and attention made (torchtitan keeps every second product), so that blocks recompute
    all or nothing.
    """
    try:
        resolved = resolve(request_of(row).replace(compile=None))
        case, cluster = resolved.cases[0], resolved.cluster
        rates = rates_of(cluster.gpu, cluster.network, cluster.gpus)
        own = LayoutCost(case, rank_counts(resolved, {}), rates, resolved.engine).time()
        batch = case.workload.batch
        free = without_degrees(request_of(row, by_name=True)).replace(
            grad_accum=None,
            gradient_checkpointing=None,
            checkpoint_policy=None,
            compile=None,
            **dict.fromkeys(row.get("lacks", ()), False),
        )
        if not row["stage"]:
            free = free.replace(stage=0)  # its engine shares no states, or did not yet
        sequences = batch.micro_batch * batch.grad_accum * case.layout.dp
        answers = [search_layouts(free, again, sequences) for again in (False, True)]
    except BadInput as error:
        return {"name": row["name"], "refused": str(error)}
    found = [(one.best is not None, one.chosen.compared, one.chosen) for one in answers if one.chosen is not None]
    if not found:
        return {"name": row["name"], "refused": "nothing fits"}
    fits, _, chosen = max(found, key=lambda one: one[:2])
    return {
        "name": row["name"],
        "over_best": own.tokens_per_second / chosen.time.tokens_per_second,
        "best": chosen.flags,
        "known_to_fit": fits,
    }


def summary(found: Sequence[Outcome]) -> dict[str, Any]:
    """Return how many runs are modelled within the bounds, and the median ratio; a refused run counts as one outside."""
    ratios = [one.ratio for one in found if one.ratio is not None]
    return {
        "runs": len(found),
        "within": sum(LOW <= ratio <= HIGH for ratio in ratios) / len(found) if found else None,
        "median": median(ratios) if ratios else None,
        "refused": len(found) - len(ratios),
    }


def summaries(found: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Return the summaries of all runs, of the blind and the other half, and of each source."""
    groups: dict[str, list[Outcome]] = {"all": list(found)}
    groups["blind"] = [one for one in found if one.row["blind"]]
    groups["open"] = [one for one in found if not one.row["blind"]]
    for one in found:
        groups.setdefault(one.row["source"], []).append(one)
    return {name: summary(group) for name, group in groups.items() if group}


def main() -> None:
    """Print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--source", default="", help="only runs whose source or name contains this")
    parser.add_argument("--json", type=Path, help="write ratios and summaries there")
    parser.add_argument("--best", action="store_true", help="hold the runs' layouts against the best that the search finds")
    parser.add_argument("--memory", action="store_true", help="plan the runs' memory in place of their time")
    asked = parser.parse_args()
    if asked.memory:
        return memory(asked.source)
    if asked.best:
        for row in rows():
            if asked.source.lower() in f"{row['source']} {row['name']}".lower():
                print(json.dumps(against_best(row), ensure_ascii=False), flush=True)
        return None
    found = list(outcomes(asked.source))
    print("| run | published, tokens/s a GPU | predicted | ratio | what it is predicted to be spent on |")
    print("|---|---:|---:|---:|---|")
    for one in found:
        name = one.row["name"] + (" (blind)" if one.row["blind"] else "")
        if one.time is None:
            print(f"| {name} | {one.row['tokens']:,.0f} | | | refused: {one.refused} |")
            continue
        parts = sorted(((seconds / one.time.total, part) for part, seconds in one.time.parts.items()), reverse=True)
        spent = ", ".join(f"{part} {100 * share:.0f} %" for share, part in parts if share >= 0.02)
        print(f"| {name} | {one.row['tokens']:,.0f} | {one.predicted:,.0f} | {one.ratio:.2f} | {spent} |")
    print(f"\n| runs | number | within {LOW}–{HIGH} | median ratio | refused |\n|---|---:|---:|---:|---:|")
    shown = summaries(found)
    for group, line in shown.items():
        middle = "" if line["median"] is None else f"{line['median']:.2f}"
        print(f"| {group} | {line['runs']} | {100 * line['within']:.0f} % | {middle} | {line['refused']} |")
    if asked.json is not None:
        ratios = {one.row["name"]: one.ratio for one in found}
        asked.json.write_text(json.dumps({"summaries": shown, "ratios": ratios}, indent=1, ensure_ascii=False) + "\n")
    return None


if __name__ == "__main__":
    main()
