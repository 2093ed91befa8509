"""Every run that was predicted before it was measured: the committed prediction beside the row, as both were first written.

    python -m benchmarks.blind

A prediction is never renewed, so a miss stays here after its cause is modelled; ``benchmarks.accuracy`` shows what the same
runs are predicted to need now.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.rows import BESIDE_ADAPTERS, CLASSES, DRAWN, KERNELS, MEDIA, TASKS
from zeroplan.report.table import render

RESULTS = Path(__file__).resolve().parent / "results"
#: Where the rows of each campaign stand, oldest first: a later campaign that names an id again has not measured it.
CAMPAIGNS = {
    "4gpu": ("four GPUs, long sequences, 8B and 14B", (RESULTS / "blind_4gpu.jsonl",)),
    "tasks": ("classifiers, T5, QLoRA, autocast, torch's loops", (TASKS,)),
    "fsdp": ("FSDP 1", (TASKS,)),
    "encoders": ("encoders and encoder-decoders", (TASKS,)),
    "vision": ("vision-language models", (TASKS,)),
    "float8": ("float8 training", (TASKS,)),
    "quantized": ("8-bit, AWQ, GPTQ and other bases", (TASKS,)),
    "saving": ("runs that save, two lengths", (TASKS,)),
    "bases": ("quantised bases under FSDP and DeepSpeed", (TASKS, RESULTS / "bases_deepspeed.jsonl")),
    "random": ("drawn at random", (DRAWN,)),
    "classes": ("classes of transformers, drawn at random", (CLASSES,)),
    "kernels": ("Liger and cut cross-entropy, parameters without gradient", (KERNELS,)),
    "beside_adapters": ("FSDP 1 with offload, averages, modules beside adapters", (BESIDE_ADAPTERS,)),
    "media": ("videos and sound, frozen parts, averages under FSDP2", (MEDIA,)),
    "offloaded_checkpoints": ("checkpoints on the host by a function", (BESIDE_ADAPTERS,)),
    "adapters_stage3": ("adapters at DeepSpeed's stage 3", (BESIDE_ADAPTERS,)),
    "frozen_blocks": ("blocks of a stack that are not frozen alike", (RESULTS / "frozen_blocks.jsonl",)),
    "frozen_blocks_2": ("the same, once all blocks were traced", (RESULTS / "frozen_blocks_2.jsonl",)),
    "fused_adapters": ("axolotl's fused adapters", (RESULTS / "fused_adapters.jsonl",)),
    "classes2": ("classes of transformers, drawn anew", (CLASSES,)),
    "classes3": ("classes of transformers, drawn a third time", (CLASSES,)),
    "classes4": ("classes of transformers, drawn a fourth time", (CLASSES,)),
}
#: A prediction is right if it is off by no more.
RIGHT = 0.01


@dataclass(frozen=True, slots=True)
class BlindRun:
    """One run with the errors of its first prediction: predicted / measured - 1."""

    id: str
    campaign: str
    peak_allocated: float
    peak_reserved: float


def blind_runs() -> list[BlindRun]:
    """Return every run whose prediction was committed before its row, campaign by campaign."""
    kept = json.loads((RESULTS / "blind.json").read_text())["rows"]
    title = "further families, experts, odd lengths, options"
    found = [BlindRun(row["id"], title, row["peak_allocated"], row["peak_reserved"]) for row in kept]
    joined: set[str] = set()
    for name, (title, paths) in CAMPAIGNS.items():
        rows = {row["id"]: row for row in _rows(paths) if row.get("ok", True)}
        for one in _predictions(RESULTS / f"blind_{name}_predicted.json"):
            row = rows.get(one["id"])
            if row is None or one["id"] in joined or "refused" in one:
                continue
            joined.add(one["id"])
            errors = (one[key] / row[key] - 1 for key in ("peak_allocated", "peak_reserved"))
            found.append(BlindRun(one["id"], title, *errors))
    return found


def _rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


def _predictions(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())
    predictions: list[dict[str, Any]] = found["predictions"] if isinstance(found, dict) else found
    return predictions


@dataclass(frozen=True, slots=True)
class Blindness:
    """How right first predictions were, of one figure: counts, and shares of what was measured."""

    runs: int
    right: int
    median: float
    worst: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Blindness:
        """Sum up errors; `worst` keeps its sign."""
        known = sorted(errors, key=abs)
        right = sum(abs(error) <= RIGHT for error in known)
        return cls(len(known), right, statistics.median(map(abs, known)), known[-1])


def _figures(runs: Iterable[BlindRun]) -> tuple[Blindness, Blindness]:
    """Sum up allocated and reserved memory."""
    found = list(runs)
    return Blindness.of(run.peak_allocated for run in found), Blindness.of(run.peak_reserved for run in found)


def blind_sentence() -> str:
    """The sentence of the README and of the page on accuracy."""
    allocated, reserved = _figures(blind_runs())
    return fill(
        f"""The table is of today's code, which has learnt from its misses. **Blind**: {allocated.runs} runs were predicted, and
the predictions committed, before they were measured. Of those first predictions {allocated.right} were right to
{RIGHT:.0%} in allocated memory and {reserved.right} in reserved; the worst was {-allocated.worst:.0%} too low
(frozen blocks, all of which are traced since).""",
        120,
    )


def proof() -> str:
    """The sentence at the head of the README."""
    now = json.loads((RESULTS / "accuracy.json").read_text())["summary"]
    blind, _ = _figures(blind_runs())
    allocated, shown = now["peak_allocated"]["p95"], now["nvml"]["p95"]
    return fill(
        f"Held against {now['rows']} runs on H100 and H200 GPUs, allocated memory is right to {allocated:.2%} in 95 % of them, "
        f"and what `nvidia-smi` shows to {shown:.1%}; of {blind.runs} runs predicted blind, {blind.right} were right to "
        f"{RIGHT:.0%}. [How far to trust it, and where not](docs/understand/accuracy.md).",
        120,
    )


def trust() -> str:
    """How far to trust each figure, as a table."""
    now = json.loads((RESULTS / "accuracy.json").read_text())["summary"]
    over = json.loads((RESULTS / "margins.json").read_text())
    allocated, _ = _figures(blind_runs())
    measured, host = now["peak_allocated"], now["host_rss"]
    rows = [
        [
            "allocated memory, of what was measured",
            f"{measured['p95']:.2%}; at worst {measured['worst']:.1%}",
            "each byte has a formula or a traced tensor",
        ],
        [
            "allocated memory, of what no run has measured",
            f"{RIGHT:.0%} in {allocated.right} of {allocated.runs}; at worst {abs(allocated.worst):.0%}",
            "the first predictions, before any run: a mechanism that nobody had met is missing",
        ],
        [
            "reserved memory, and the total",
            f"the interval that is printed; {over['false_safe']} of {over['rows']} runs took more",
            "which cached block is taken hangs on timing",
        ],
        ["host memory", f"{host['p95']:.0%}; at worst {host['worst']:.0%}", "library pages that a process touches"],
        ["tokens a second", "a ranking", "[how far off](../recommend_measured.md), on the machines that were measured"],
        ["what is *unknown*", "a lower bound", "the plan [names what is missing](../estimate.md#when-it-is-unknown)"],
    ]
    return render(["figure", "trust it to", "because"], rows, "github")


#: Why first predictions missed; all of it is modelled since.
_CAUSES = """\
Causes, modelled since: `Q…` (4-bit bases: adapters in another dtype than assumed), `L21` (FSDP2's micro batches that
reduce nothing leave whole gradients), `B05` and `B06` (DeepSpeed's stage 3 keeps gathered weights of a quantised
base), and FSDP 1's reserved memory (gradients are held until the next forward)."""
_FIRST_CAUSES = """\
What missed there, and the cause, modelled since: `F18` reserved (a leaf module's gradients are reduced in the order
of its parameters); host memory of `K01` (a partial offload pins the GPU's gradients, too), of `K25` (torch's own Adam
on the host has two temporaries), of `F16` and `F17` (grouped products' kernels) and of `K09` (an offloaded
optimizer's kernels are never loaded); `K13` was refused (FSDP2 with CPUOffloadPolicy). `K10` and `K21` reserved still
miss."""


def predicted_first(first: list[list[str]], refused: int) -> list[str]:
    """The section of the accuracy page.

    Args:
        first: the table of the first campaign's errors, in all figures.
        refused: runs of that campaign that had no prediction.
    """
    runs = blind_runs()
    rows = []
    for campaign in dict.fromkeys(run.campaign for run in runs):
        both = _figures(run for run in runs if run.campaign == campaign)
        rows.append([campaign, *(cell for one in both for cell in (f"{one.right} of {one.runs}", f"{one.worst:+.1%}"))])
    missed = [f"`{run.id}` ({run.peak_allocated:+.0%})" for run in runs if abs(run.peak_allocated) > RIGHT]
    said = f"""The table at the head shows runs as they are predicted now. {len(runs)} runs were predicted, and the predictions
committed, before they were measured, and this is how right those first predictions were (`python -m
benchmarks.blind`). Some of these runs are not in the table at the head."""
    head = ["campaign", f"allocated within {RIGHT:.0%}", "worst", f"reserved within {RIGHT:.0%}", "worst"]
    all_figures = f"The first campaign, runs whose ids begin with F and K, in all figures ({refused} more was refused):"
    return [
        *("## Predicted before measured", "", fill(said, 120), "", render(head, rows, "github"), ""),
        *(fill(f"Allocated memory missed by more than {RIGHT:.0%}: {', '.join(missed)}.", 120), "", fill(_CAUSES, 120), ""),
        *(fill(all_figures, 120), "", render(["figure", "runs", "median", "95 %", "worst"], first, "github"), ""),
        *(fill(_FIRST_CAUSES, 120), ""),
    ]


def main() -> None:
    """Print every campaign, and the runs whose first prediction missed."""
    runs = blind_runs()
    for campaign in dict.fromkeys(run.campaign for run in runs):
        mine = [run for run in runs if run.campaign == campaign]
        for key in ("peak_allocated", "peak_reserved"):
            found = Blindness.of(getattr(run, key) for run in mine)
            print(f"{campaign:50} {key:15} {found.right:3} of {found.runs:3} within {RIGHT:.0%}, worst {found.worst:+.1%}")
    for run in runs:
        if abs(run.peak_allocated) > RIGHT:
            print(f"missed: {run.id:5} allocated {run.peak_allocated:+.1%}, reserved {run.peak_reserved:+.1%}")


if __name__ == "__main__":
    main()
