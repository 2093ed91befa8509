"""The recommendation against the truth: a grid of candidates, each measured under DeepSpeed on a capped GPU.

``python -m benchmarks.recommend.measure specs --setup NAME > specs.jsonl`` writes what ``benchmarks.recommend.driver`` runs.
``… predict --setup NAME`` prints what zeroplan says of the grid, to be kept before it is measured.
``… emit FOLDER`` writes the recommended config of Llama-3.2-1B on one 24 GB card, and the jobs that train it as it is.
``… keep ROWS.jsonl…`` adds measured rows to those that are kept (benchmarks/ground_truth/grid.jsonl), without their marks.
``… compare [ROWS.jsonl…]`` holds measured rows, the kept ones by default, against the ranking that the same candidates get
from ``zeroplan.search``: whether the first of those that fit reaches the best measured speed, how far step times are off,
Kendall's τ, and what was said to fit and did not, or the other way round. ``benchmarks/recommend/grid.sh`` does the measuring.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.recommend.setups import SETUPS, Choice, Setup, request_of, specs
from benchmarks.recommend.speeds import kendall, within
from benchmarks.rows import GPUS, GRID
from zeroplan.core.sizes import GIB
from zeroplan.run.ask import Ask
from zeroplan.search.api import run_search
from zeroplan.search.candidates_file import candidate_of
from zeroplan.search.results import Recommendation, SearchResult
from zeroplan.search.search_options import SearchOptions, resolve_search
from zeroplan.search.space import Candidate

#: What is kept of a row.
_KEPT = (
    *("id", "engine", "model", "world", "dtype", "stage", "micro_batch", "seq_len", "gradient_accumulation_steps"),
    *("gradient_checkpointing", "attn", "lora_rank", "zero_overrides", "ok", "gpu", "cap", "alloc_conf", "threads"),
    *("peak_allocated", "peak_reserved", "step_seconds", "seconds", "tokens_per_s", "retries", "timed_without_marks"),
    *("error", "detail", "phase", "config", "losses", "loss_fell"),
)
RESULT = Path(__file__).resolve().parent.parent / "results" / "recommend.json"
#: The GPU that a grid is predicted for.
GPU = "H200"
#: The check that an emitted config trains as it is: this model on one card of so many GiB.
EMITTED_MODEL, EMITTED_VRAM, EMITTED_STEPS = "meta-llama/Llama-3.2-1B", 24, 10


def ranked(name: str, setup: Setup, gpu: str = "H100", profile: Path | None = None) -> SearchResult:
    """Rank the candidates as zeroplan does on such a GPU, by its preset or by a profile of measured rates."""
    request, options = request_of(setup, gpu), SearchOptions()
    problem = resolve_search(request, options)
    given: list[Candidate] = [
        candidate_of(spec.ds_config(), problem, request, spec.checkpointing, index, choice.alloc_conf)
        for index, (spec, choice) in enumerate(zip(specs(name, setup), setup.grid, strict=True))
    ]
    return run_search(request, SearchOptions(candidates=given, profile=profile))


def predict(setup: Setup, said: SearchResult) -> dict[str, Any]:
    """Predict the candidates of a grid, the fastest first."""
    first = next((one.index for one in said.ranking if one.fits), None)
    return {"recommended": first, "table": [_line(setup.grid[one.index], one, None) for one in said.ranking]}


def compare(name: str, setup: Setup, rows: list[dict[str, Any]], profile: Path | None = None) -> dict[str, Any]:
    """Return the figures for one setup. Only runs that ended by themselves count: through, or out of the GPU's memory."""
    measured = {int(row["id"].rsplit("-", 1)[1]): row for row in rows if row["id"].startswith(f"{name}-")}
    measured = {i: row for i, row in measured.items() if row["ok"] or row["error"] == "out of memory"}
    gpu = GPUS[next(iter(measured.values()))["gpu"]]
    ranking = [one for one in ranked(name, setup, gpu, profile).ranking if one.index in measured]
    ran = {i: row for i, row in measured.items() if row["ok"]}
    best = max((row["tokens_per_s"] for row in ran.values()), default=0.0)
    first = next((one for one in ranking if one.fits), None)
    reached = ran[first.index]["tokens_per_s"] / best if first is not None and first.index in ran else 0.0
    pairs = [(one.step_seconds, ran[one.index]["step_seconds"]) for one in ranking if one.index in ran]
    speeds = [(one.tokens_per_second, ran[one.index]["tokens_per_s"]) for one in ranking if one.index in ran]
    said_not = [one.index for one in ranking if one.fits is False]
    return {
        "setup": name,
        "gpu": gpu,
        "measured": len(measured),
        "ran": len(ran),
        "recommended": None if first is None else first.index,
        "reached_of_best": round(reached, 3),
        "within_15_percent": round(within(pairs, 0.15), 3) if pairs else None,
        "kendall_tau": round(kendall(speeds), 3) if len(speeds) > 1 else None,
        "said_to_fit_and_died": [one.index for one in ranking if one.fits and one.index not in ran],
        "said_not_to_fit": len(said_not),
        "of_those_died": sum(i not in ran for i in said_not),
        "table": [_line(setup.grid[one.index], one, ran.get(one.index)) for one in ranking],
    }


def _line(choice: Choice, one: Recommendation, row: dict[str, Any] | None) -> dict[str, Any]:
    gpu = one.plan.gpu
    line: dict[str, Any] = {
        "index": one.index,
        "choice": f"{choice.stage}{choice.offload} micro {choice.micro}{' ckpt' if choice.again else ''} {choice.buckets}"
        f"{' expandable' if choice.expandable else ''}".strip(),
        "fits": one.fits,
        "ran": row is not None,
        "predicted_seconds": round(one.step_seconds, 4),
        "predicted_reserved": gpu.peak_reserved,
        "bound": one.time.bound.value,
    }
    if row is not None:
        line |= {
            "measured_seconds": round(row["step_seconds"], 4),
            "off": round(one.step_seconds / row["step_seconds"] - 1, 3),
            "measured_reserved": row["peak_reserved"],
            "retries": row.get("retries", 0),
        }
    return line


def overall(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all setups together."""
    ran = [line for one in found for line in one["table"] if line["ran"]]
    said_not = sum(one["said_not_to_fit"] for one in found)
    return {
        "setups": len(found),
        "measured": sum(one["measured"] for one in found),
        "least_reached_of_best": min(one["reached_of_best"] for one in found),
        "within_15_percent": round(sum(abs(line["off"]) < 0.15 for line in ran) / len(ran), 3),
        "least_kendall_tau": min(one["kendall_tau"] for one in found),
        "said_to_fit_and_died": sum(len(one["said_to_fit_and_died"]) for one in found),
        "said_not_to_fit_and_died": round(sum(one["of_those_died"] for one in found) / said_not, 3) if said_not else None,
    }


def emit(folder: Path) -> None:
    """Write what ``zeroplan recommend`` emits for one 24 GB card, and the jobs that train it under both engines."""
    request = Ask(model=EMITTED_MODEL, gpu="H100", vram=EMITTED_VRAM * GIB, cpu_ram=64 * GIB, seq_len=1024)
    best = run_search(request, SearchOptions(explain=False)).best
    assert best is not None
    setup = Setup(EMITTED_MODEL, 1, EMITTED_VRAM, 1024, (Choice(best.zero.stage, "o", best.workload.batch.micro_batch, False),))
    spec = replace(
        next(specs("emitted", setup)),
        checkpointing=best.workload.gradient_checkpointing,
        grad_accum=best.workload.batch.grad_accum,
        env={"PYTORCH_ALLOC_CONF": best.alloc_conf} if best.alloc_conf else {},
        steps=EMITTED_STEPS,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "ds_config.json"
    config.write_text(json.dumps(best.ds_config(), indent=2) + "\n")
    for engine in ("deepspeed", "zeroplan"):
        job = replace(spec, id=f"emitted-{engine}").to_dict() | {"config": str(config), "runtime": engine == "zeroplan"}
        print(json.dumps(job))


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what is not compared."""
    whole = dict(row)
    if "marks" in row:
        whole["retries"] = max(mark.get("retries", 0) for mark in row["marks"])
    if row.get("per_rank"):
        whole["seconds"] = row["per_rank"][0].get("seconds")
    return {name: whole[name] for name in _KEPT if name in whole}


def keep(rows: list[dict[str, Any]]) -> None:
    """Add these rows to those that are kept; a later run of a candidate takes the place of an earlier one."""
    known = {row["id"]: row for row in _read([GRID])} | {row["id"]: kept(row) for row in rows}
    GRID.write_text("".join(json.dumps(row) + "\n" for _, row in sorted(known.items())))


def _read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines() if line.strip()]
    return [json.loads(line) for line in lines]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("specs", "predict", "emit", "keep", "compare"))
    parser.add_argument("--setup", choices=sorted(SETUPS), action="append")
    parser.add_argument("--profile", type=Path, help="rates that doctor --calibrate measured on the machine of the rows")
    parser.add_argument("--out", type=Path, default=RESULT, help="where compare writes")
    parser.add_argument("paths", nargs="*", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "emit":
        emit(arguments.paths[0])
        return
    names = arguments.setup or list(SETUPS)
    if arguments.verb == "specs":
        for name in names:
            for spec in specs(name, SETUPS[name]):
                print(json.dumps(spec.to_dict()))
        return
    if arguments.verb == "predict":
        print(
            json.dumps(
                {name: predict(SETUPS[name], ranked(name, SETUPS[name], GPU, arguments.profile)) for name in names}, indent=1
            )
        )
        return
    rows = [kept(row) for row in _read(arguments.paths or [GRID])]
    if arguments.verb == "keep":
        keep(rows)
        return
    measured = [name for name in names if any(row["id"].startswith(f"{name}-") for row in rows)]
    found = [compare(name, SETUPS[name], rows, arguments.profile) for name in measured]
    emitted = [row for row in rows if row["id"].startswith("emitted-")]
    summary = overall(found)
    arguments.out.write_text(json.dumps({"overall": summary, "setups": found, "emitted": emitted}, indent=1) + "\n")
    print(json.dumps([{k: v for k, v in one.items() if k != "table"} for one in found], indent=1))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
