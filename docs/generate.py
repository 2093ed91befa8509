"""Writes the pages that are made from the code, from docstrings and from results.

``python docs/generate.py`` writes them, and renews what commands in the other pages print; with ``--check`` it exits with 1
when a page is stale (tests/docs holds the commands). ``python docs/generate.py PAGE…`` renews those pages' alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from textwrap import fill
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.blind import blind_sentence, predicted_first, proof, trust
from benchmarks.causes import ALLOCATED, RESERVED, table_of_causes
from benchmarks.from_files.predict import BLIND, read, table
from benchmarks.layouts.recommended import recommended_plans
from benchmarks.layouts.two_gpus import steps_table
from benchmarks.published.page import published
from benchmarks.recommend.page import measured
from benchmarks.step.page import runtime_speed
from benchmarks.verified import verify_measured
from docs.commands import PAGES_WITH_COMMANDS, renewed
from zeroplan.core.cluster import Cluster
from zeroplan.core.gpus import GPUS
from zeroplan.core.sizes import GIB, format_bytes, format_count
from zeroplan.core.versions import Version, version_text
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan.ds_config.sections import SECTIONS
from zeroplan.ds_config.versions import DEFAULT_CHANGES, KEY_HISTORIES
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.deepspeed.versions import OLDEST, Knob
from zeroplan.engines.registry import engine_names, find_engine
from zeroplan.ledger.line import derived, glossary_of
from zeroplan.models.catalog import catalog_table
from zeroplan.models.load import load_model
from zeroplan.report.table import render

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT.parent / "benchmarks" / "results"
MODEL = "meta-llama/Llama-3.2-1B"
_NOTE = "<!-- Made by docs/generate.py; edit the code, not this page. -->\n\n"


def ledger() -> str:
    """Every line of every engine, derived once per stage and offload."""
    out = [
        "# The ledger",
        "",
        "Each row is one formula: the function that gives the number in `estimate` is the function that was derived here,",
        f"for `{MODEL}` on 8 GPUs. Bytes are of one rank. `zeroplan explain` does the same with your numbers.",
        "",
    ]
    spec = load_model(MODEL)
    for name in engine_names():
        engine = find_engine(name)
        workload = Workload.of(seq_len=2048, precision=engine.precision(DType.BF16))
        cases = [Case(spec, workload, Cluster(gpus=8), zero) for zero in engine.options()]
        names = glossary_of(type(engine.ledger(cases[0])[1]))
        out += [f"## {name} {engine.version}", "", "### Names", ""]
        out += [render(["name", "what"], [[f"`{key}`", text] for key, text in names.items()], "github"), ""]
        for case in cases:
            zero = case.zero
            offload = f", optimizer {zero.offload_optimizer.device}" if zero.offload_optimizer else ""
            offload += f", parameters {zero.offload_param.device}" if zero.offload_param else ""
            out += [f"### Stage {zero.stage}{offload}", "", _lines(engine, case), ""]
    return "\n".join(out)


def _lines(engine: Engine, case: Case) -> str:
    lines, facts = engine.ledger(case)
    rows = [
        [f"`{item.buffer.value}`", item.place.value, format_bytes(item.bytes), f"`{item.formula}`", item.doc, item.source]
        for item in derived(lines, facts)
    ]
    return render(["buffer", "place", "bytes", "formula", "what", "source"], rows, "github")


def models() -> str:
    """The catalog."""
    table = catalog_table()
    rows = [
        [f"`{row['id']}`", row["family"], f"{row['params']:,}", format_count(row["params"]), row["source"]] for row in table
    ]
    also = sum(len(row["also"]) for row in table)
    return "\n".join(
        [
            "# Models in the catalog",
            "",
            f"{len(table)} models by id, and {also} more ids of the same shapes (instruction-tuned variants and old names).",
            "Any other model loads from the hub, a folder, a config, checkpoint headers or a live module.",
            "",
            render(["id", "family", "parameters", "short", "source"], rows, "github"),
            "",
        ]
    )


def gpus() -> str:
    """The presets."""
    rows = [
        [
            g.name,
            format_bytes(g.memory, digits=1),
            format_bytes(g.usable, digits=1),
            f"{g.bf16_tflops:g}" + ("" if g.bf16 else " (fp16)"),
            f"{g.bandwidth_gbs:g}",
            f"{g.link_gbs:g}",
            f"{g.pcie_gbs:g}",
            g.source,
        ]
        for g in GPUS.values()
    ]
    headers = ["GPU", "memory", "usable", "bf16 TFLOP/s", "memory GB/s", "link GB/s", "host link GB/s", "source"]
    text = "Rates are dense; links are one direction."
    return "\n".join(["# GPU presets", "", text, "", render(headers, rows, "github"), ""])


def _shown(default: Any) -> str:
    """Show a key's default as a file has it where it is a word of ours."""
    return default.value if isinstance(default, Enum) else repr(default)


def keys() -> str:
    """Every key of a ds_config."""
    text = (
        f"What each key of DeepSpeed {DEEPSPEED_VERSION}'s config does to memory, as far as zeroplan knows, and what the two"
        " programs that read it do with the key. A key that zeroplan's runtime refuses may stand at its default."
    )
    out = ["# Keys of a ds_config", "", text, ""]
    for path, section in SECTIONS.items():
        rows = [
            [
                f"`{key.name}`",
                key.kind.value,
                f"`{_shown(key.default)}`",
                key.effect.value,
                key.deepspeed.value,
                key.runtime.value,
            ]
            for key in section.keys.values()
        ]
        if rows:
            headers = ["key", "type", "default", "effect", "DeepSpeed", "zeroplan's runtime"]
            out += [f"## {path or 'Top level'}", "", render(headers, rows, "github"), ""]
    return "\n".join(out)


def accuracy() -> str:
    """Every measured run beside its prediction, and the other estimators on the same runs."""
    ours, blind, peers = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("accuracy", "blind", "peers"))
    summary = ours["summary"]
    what = {"peak_allocated": "peak allocated", "peak_reserved": "peak reserved", "nvml": "NVML", "host_rss": "host resident"}
    errors = _errors(summary, what)
    marks = summary["marks"]
    others = [
        [name, str(s["rows"]), f"{s['mean_absolute']:.1%}", f"{s['worst']:+.1%}", f"{s['below']} of {s['rows']}"]
        for name, s in peers["summary"].items()
    ]
    rows = [
        [f"`{r['id']}`", r["what"], *(f"{r[key]:+.2%}" if r[key] is not None else "-" for key in what)] for r in ours["rows"]
    ]
    refused = [f"- `{r['id']}`: {r['why']}" for r in ours["refused"]]
    out = [
        "# Accuracy",
        "",
        "Runs of real DeepSpeed 0.19.8, FSDP 1 and 2, and DDP (torch 2.11, transformers 5.17) on 1 to 8 H100 and H200 GPUs, in",
        "`benchmarks/ground_truth/`, each predicted from what a user would have typed. `python -m benchmarks.accuracy` makes",
        "this table again; error is predicted / measured − 1. Allocated and reserved memory have no constant from a run; what",
        "processes and CUDA's libraries take beside them was read off some of these runs (`zeroplan/engines/process.py`).",
        "",
        render(["figure", "runs", "median", "95 %", "worst"], errors, "github"),
        "",
        f"By phase: {marks['within']:.1%} of {marks['marks']} marks are within {marks['tolerance']:.0%} of what was allocated.",
        "",
        "Which cached block a request lands in decides how far reserved memory exceeds allocated memory. Host figures rest on",
        "how many library pages a process has touched.",
        "",
        f"## Beyond {RESERVED:.0%} reserved or {ALLOCATED:.2%} allocated",
        "",
        table_of_causes(ours["rows"]),
        "",
        *predicted_first(_errors(blind["summary"], what), len(blind["refused"])),
        "## Other estimators on the same runs",
        "",
        "Against what NVML showed (`python -m benchmarks.peers`).",
        "",
        render(["estimator", "runs", "mean error", "worst", "too low"], others, "github"),
        "",
        "## Every run",
        "",
        render(["id", "run", *what.values()], rows, "github"),
    ]
    return "\n".join([*out, *(["", "Not predicted:", "", *refused] if refused else [])])


def _errors(summary: dict[str, Any], what: dict[str, str]) -> list[list[str]]:
    """A table row for each figure that the summary holds."""
    return [
        [text, f"{s['rows']}", f"{s['median']:.2%}", f"{s['p95']:.2%}", f"{s['worst']:.2%}"]
        for key, text in what.items()
        if (s := summary.get(key))
    ]


def accuracy_in_words() -> str:
    """The part of the README, and of the page on how the figures were come by."""
    ours, peers = (json.loads((RESULTS / f"{name}.json").read_text())["summary"] for name in ("accuracy", "peers"))
    head = (
        f"On {ours['rows']} measured runs of real DeepSpeed, FSDP and DDP on 1 to 8 H100 and H200 GPUs, each predicted from"
        " what a user would have typed, the prediction was off by:"
    )
    names = {
        "peak_allocated": "peak allocated",
        "peak_reserved": "peak reserved",
        "nvml": "what NVML shows",
        "host_rss": "host memory",
    }
    rows = [
        [text, f"{ours[key]['median']:.2%}", f"{ours[key]['p95']:.2%}", f"{ours[key]['worst']:.1%}"]
        for key, text in names.items()
    ]
    others = {"DeepSpeed's estimator": "DeepSpeed's estimator", "accelerate": "accelerate's", "llm-analysis": "llm-analysis"}
    means = [f"{name} by {peers[key]['mean_absolute']:.0%}" for key, name in others.items()]
    beside = f"On the same runs {means[0]} is off on average, {' and '.join(means[1:])}.".replace(" by", " is off by", 1)
    beside = beside.replace(" is off on average", " on average")
    table = render(["", "in the median", "in 95 % within", "at worst"], rows, "github")
    return "\n\n".join([fill(head, 120), table, blind_sentence(), fill(beside, 120)])


def _reported() -> Any:
    return json.loads((RESULTS / "reported.json").read_text())


def _score_row(name: str, one: Any) -> list[str]:
    verdicts = [str(one["verdicts"][kind]) for kind in ("right", "false-safe", "false alarm", "unknown")]
    return [name, str(one["runs"]), *verdicts, f"{one['close']} of {one['figures']}" if one["figures"] else ""]


def _source(name: str) -> str:
    """A thread as it is, a file of a repository by its name alone."""
    repository, _, path = name.partition(":")
    return f"{repository}, {Path(path).stem}" if path else repository


def reported_scores() -> str:
    """Reported runs by source: verdicts, and figures that are close."""
    result = _reported()
    head = ["source", "runs", "right", "false-safe", "false alarm", "unknown", "figures within 10 %"]
    rows = [_score_row(_source(source), one) for source, one in result["complete_by_source"].items()]
    return render(head, [*rows, _score_row("**all**", result["complete"])], "github")


def reported_unknown() -> str:
    """Reported runs of which a plan does not say whether they fit, by the reason that it gives."""
    reasons: dict[str, list[str]] = {}
    for run in _reported()["runs"]:
        if run["complete"] and run["verdict"] == "unknown":
            reasons.setdefault(run["said"], []).append(run["id"])
    rows = [[str(len(ids)), ", ".join(f"`{one}`" for one in ids), says.replace("|", "/")] for says, ids in reasons.items()]
    return render(["runs", "which", "what the plan says"], sorted(rows, key=lambda row: -int(row[0])), "github")


def reported_far() -> str:
    """Reported figures of which the plan is more than 10 % away."""
    rows = [
        [f"`{run['id']}`", one["what"], f"{one['reported'] / GIB:.1f}", f"{one['planned'] / GIB:.1f}", f"{one['error']:+.0%}"]
        for run in _reported()["runs"]
        if run["complete"]
        for one in run["figures"]
        if abs(one["error"]) > 0.10
    ]
    return render(["run", "figure", "reported, GiB", "planned", "error"], rows, "github")


def from_files() -> str:
    """Runs that were planned from their own files, beside what was measured."""
    return table(read(BLIND.parent / "measured.jsonl"))


#: Parts of pages that are written by hand, between ``<!-- made: NAME -->`` and ``<!-- end -->``.
PARTS: dict[str, Callable[[], str]] = {
    "accuracy": accuracy_in_words,
    "proof": proof,
    "trust": trust,
    "reported_scores": reported_scores,
    "reported_unknown": reported_unknown,
    "reported_far": reported_far,
    "from_files": from_files,
    "recommended_plans": recommended_plans,
    "steps_table": steps_table,
}


def with_parts(text: str) -> str:
    """The page with its made parts as they are now."""
    return re.sub(
        r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)",
        lambda part: f"{part[1]}{PARTS[part[2]]()}\n{part[3]}",
        text,
        flags=re.DOTALL,
    )


def deepspeed_versions() -> str:
    """What DeepSpeed's versions do differently."""
    knobs = [
        [_span(row.since, row.until), row.before, row.after, f"`{row.source}`"]
        for row in sorted((knob.value for knob in Knob), key=lambda row: row.since)
    ]
    defaults = [[version_text(one.since), f"`{one.path}`", f"`{one.before!r}`", f"`{one.source}`"] for one in DEFAULT_CHANGES]
    histories = [
        [f"`{one.path}`", version_text(one.since) if one.since else "", version_text(one.until) if one.until else ""]
        for one in KEY_HISTORIES
    ]
    return "\n".join(
        [
            "# DeepSpeed's versions",
            "",
            f"Plans are for DeepSpeed {DEEPSPEED_VERSION}, and only its runs were measured on GPUs.",
            "`--deepspeed-version 0.14.2` plans for another version: with the defaults that it had, with the keys that it",
            "knows, and with every row below whose version is later undone. The rows were read in the source of every release",
            f"from {version_text(OLDEST)} on. The sizes of what 0.14.4, 0.16.9, 0.18.9 and 0.19.3 allocate at stages 0 to 3,",
            "and 0.10.3 and 0.12.6 at stages 1 and 2, were held against the schedules on one rank of a CPU. A version that was",
            "not compared is planned as the nearest one, and the plan says so, as it says what no row covers: older NVMe",
            "buffers, Muon, and fp32 gradients of stage 1.",
            "`python -m benchmarks.deepspeed_versions FOLDER` holds keys and defaults against the source of every version in",
            "the folder: those of twelve from 0.10.3 to 0.19.8 are as these tables say.",
            "",
            "In place of the number the flag takes a file that states it exactly (a log, a `requirements.txt`, …), or",
            "`installed` for this Python's package. Without the flag `--from` takes the version that `requirements*.txt`,",
            "`pyproject.toml` or `environment*.yml` pins beside its file, or above it up to its repository's root, and",
            "`doctor LOG MODEL` the one that the log prints; each says where the version stands.",
            "",
            render(["from", "before", "from then on", "source"], knobs, "github"),
            "",
            "## Defaults that moved",
            "",
            render(["until", "key", "default before", "source"], defaults, "github"),
            "",
            "## Keys that came and went",
            "",
            "A key that is too new is refused in `zero_optimization`, and from 0.17.1 on in `fp16` and `bf16`; elsewhere it is",
            "ignored. `zeroplan check --deepspeed-version` says which.",
            "",
            render(["key", "from", "refused from"], histories, "github"),
            "",
        ]
    )


def _span(since: Version, until: Version | None) -> str:
    return version_text(since) + (f", before {version_text(until)}" if until else "")


PAGES: dict[str, Callable[[], str]] = {
    "deepspeed_versions.md": deepspeed_versions,
    "ledger.md": ledger,
    "models.md": models,
    "gpus.md": gpus,
    "ds_config_keys.md": keys,
    "accuracy.md": accuracy,
    "runtime_speed.md": runtime_speed,
    "verify_measured.md": verify_measured,
    "recommend_measured.md": measured,
    "published.md": published,
}


#: Pages that are written by hand, with made parts and with the output of commands in them.
WRITTEN = [path for path in PAGES_WITH_COMMANDS if path.name not in PAGES or path.parent != ROOT]


def main() -> int:
    """Write the pages, or say which are stale."""
    named = [Path(word) for word in sys.argv[1:] if not word.startswith("-")]
    if "--check" in sys.argv[1:]:
        stale = [name for name, make in PAGES.items() if _read(ROOT / name) != _page(make)]
        stale += [path.name for path in WRITTEN if with_parts(path.read_text()) != path.read_text()]
        if stale:
            print(f"stale: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    if not named:
        for name, make in PAGES.items():
            (ROOT / name).write_text(_page(make))
    with tempfile.TemporaryDirectory() as folder:  # neither a cache nor a profile of this machine counts
        os.environ.update(XDG_CACHE_HOME=f"{folder}/cache", XDG_CONFIG_HOME=f"{folder}/config")
        for path in named or WRITTEN:
            text = path.read_text()
            if (new := with_parts(renewed(text))) != text:
                path.write_text(new)
    return 0


def _page(make: Callable[[], str]) -> str:
    return _NOTE + make().rstrip() + "\n"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    raise SystemExit(main())
