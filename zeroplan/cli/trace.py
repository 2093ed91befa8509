"""``zeroplan trace``: the allocations of one micro batch, from a shipped or cached tape or traced now."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import show, show_json, verb
from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import write_atomic
from zeroplan.engines.registry import find_engine
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask

Stage = Annotated[int | None, typer.Option("--stage", rich_help_panel="Sharding", help="0 to 3. [the engine's default]")]


@verb("zeroplan trace meta-llama/Llama-3.2-1B", "zeroplan trace ./my_model --seq-len 4k -o tape.json", name="trace")
@flags.takes_run(
    "trace",
    only=(
        *("model", "task", "micro_batch", "seq_len", "source_len", "target_len", "dtype", "transformers_version", "attn"),
        *("gradient_checkpointing", "checkpoint_policy", "lora_rank", "lora_targets", "quantize", "compile", "images"),
        *("image_size", "video_frames", "audio_seconds", "labelled_share", "gpu", "engine", "deepspeed_version", "token"),
        "trust_remote_code",
    ),
)
def trace_command(
    request: Ask,
    stage: Stage = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", callback=flags.writable, help="Write the tape there as JSON."),
    ] = None,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> None:
    """Show what one micro batch of MODEL allocates.

    Its forward and backward are traced, once, and kept for later predictions.
    """
    from zeroplan.planner.tapes import expand_for
    from zeroplan.report.tape import TracedBatch, tape_json, tape_text
    from zeroplan.report.terminal import Terminal
    from zeroplan.tape.summary import summarise
    from zeroplan.tapes import find_tape, get_tape

    if request.model is None:
        raise BadInput("no model", where="MODEL", remedy="give one id, path or config")
    if stage is None:
        stage = find_engine(request.engine).default().stage
    resolved = resolve(request.replace(stage=stage))
    spec, workload, case = resolved.spec, resolved.engine.traced(resolved.workload), resolved.cases[0]
    zero3 = resolved.engine.trace_options(case).zero3
    began = time.perf_counter()
    tape = find_tape(spec, workload, zero3=zero3)
    source = "at hand"
    if tape is None:
        tape, source = get_tape(spec, workload, zero3=zero3), "traced now"
    summary = summarise(expand_for(tape, case))
    seconds = time.perf_counter() - began
    traced = TracedBatch(spec.name, source, seconds, workload.batch.micro_batch, workload.batch.seq_len, summary)
    if output is not None:
        _write(output, tape)
    if as_json:
        show_json(tape_json(traced))
    else:
        show(tape_text(traced, Terminal.here(), quiet=quiet))


def _write(path: str, tape: Any) -> None:
    from zeroplan.tape.codec import to_json

    write_atomic(path, json.dumps(to_json(tape), separators=(",", ":")))
