"""``zeroplan trace``: the allocations of one micro batch, from a shipped or cached tape or traced now."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Annotated, Any

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import app
from zeroplan.core.errors import BadInput
from zeroplan.core.files import write_atomic
from zeroplan.core.units import format_bytes
from zeroplan.planner.request import Request, resolve

Stage = Annotated[int | None, typer.Option("--stage", rich_help_panel="Sharding", help="0 to 3. [2; ddp: 0]")]


@app.command(name="trace")
@flags.takes_request(
    "params",
    "grad_accum",
    "optimizer",
    "gpus",
    "nodes",
    "vram",
    "cpu_ram",
    "nvme",
    "offload_optimizer",
    "offload_param",
    "ds_config",
    "depth",
    "alloc_conf",
)
def trace_command(
    request: Request,
    stage: Stage = None,
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the tape there as JSON.")] = None,
    as_json: flags.Json = False,
) -> None:
    """Trace one micro batch of MODEL: what its forward and backward allocate, kept for later predictions."""
    from zeroplan.core.tape_sizes import KernelDevice
    from zeroplan.core.tape_summary import summarise
    from zeroplan.tapes import find_tape, get_tape

    if request.model is None:
        raise BadInput("no model", where="MODEL", remedy="give one id, path or config")
    if stage is None:
        stage = 0 if request.engine.lower() == "ddp" else 2
    resolved = resolve(replace(request, stage=stage))
    spec, workload, case = resolved.spec, resolved.workload, resolved.cases[0]
    zero3 = resolved.engine.trace_options(case).zero3
    began = time.perf_counter()
    tape = find_tape(spec, workload, zero3=zero3)
    source = "at hand"
    if tape is None:
        tape, source = get_tape(spec, workload, zero3=zero3), "traced now"
    device = KernelDevice.of(resolved.cluster.gpu)
    stream = tape.expand(workload.micro_batch, workload.seq_len or 1, workload.lora_rank, device=device)
    summary = summarise(stream)
    facts: dict[str, Any] = {
        "schema": 1,
        "model": spec.name,
        "source": source,
        "seconds": round(time.perf_counter() - began, 3),
        "micro_batch": workload.micro_batch,
        "seq_len": workload.seq_len,
        "events": summary.events,
        "live_after_forward": summary.live_after_forward,
        "peak_forward": summary.peak_forward,
        "peak_backward": summary.peak_backward,
        "gradients": summary.gradients,
        "at_peak": {kind.name.lower(): size for kind, size in summary.at_peak.items()},
        "largest": [{"module": name, "kind": kind.name.lower(), "bytes": size} for name, kind, size in summary.largest],
    }
    if output is not None:
        _write(output, tape)
    typer.echo(json.dumps(facts, indent=2) if as_json else _text(facts))


def _write(path: str, tape: Any) -> None:
    from zeroplan.core.tape_codec import to_json

    write_atomic(path, json.dumps(to_json(tape), separators=(",", ":")))


def _text(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['model']}: micro batch {facts['micro_batch']}, {facts['seq_len']} tokens; {facts['source']}, "
        f"{facts['seconds']} s, {facts['events']:,} events",
        f"  live after the forward  {format_bytes(facts['live_after_forward']):>12}",
        f"  peak of the forward     {format_bytes(facts['peak_forward']):>12}",
        f"  peak of the backward    {format_bytes(facts['peak_backward']):>12}   with all gradients kept "
        f"({format_bytes(facts['gradients'])})",
        "at the highest point:",
        *(f"  {kind:<12}{format_bytes(size):>12}" for kind, size in facts["at_peak"].items()),
        "largest blocks there:",
        *(f"  {format_bytes(one['bytes']):>12}  {one['kind']:<10} {one['module'] or '-'}" for one in facts["largest"]),
    ]
    return "\n".join(lines)
