"""``zeroplan explain``: how every byte of a plan was derived."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import app

if TYPE_CHECKING:
    from zeroplan.planner.request import Request


@app.command()
def explain(
    model: flags.Model = None,
    params: flags.Params = None,
    line: Annotated[str | None, typer.Option("--line", help="One buffer or line only: optim.exp_avg.")] = None,
    micro_batch: flags.MicroBatch = None,
    seq_len: flags.SeqLen = None,
    grad_accum: flags.GradAccum = None,
    dtype: flags.Dtype = None,
    optimizer: flags.OptimizerName = None,
    gradient_checkpointing: flags.Checkpointing = False,
    attn: flags.Attn = "sdpa",
    lora_rank: flags.LoraRank = None,
    lora_targets: flags.LoraTargets = None,
    gpus: flags.Gpus = 1,
    nodes: flags.Nodes = 1,
    gpu: flags.GpuName = None,
    vram: flags.Vram = None,
    engine: flags.EngineName = "deepspeed",
    stage: flags.Stage = None,
    offload_optimizer: flags.OffloadOptimizer = None,
    offload_param: flags.OffloadParam = None,
    ds_config: flags.DsConfig = None,
    depth: flags.Depth = None,
    token: flags.Token = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    time: Annotated[bool, typer.Option("--time", help="Derive the step time in place of the memory.")] = False,
    as_json: flags.Json = False,
) -> None:
    """Derive every line of MODEL's plans with your numbers: the formula, its values, its source."""
    if time:
        typer.echo(_time(flags.request(locals()), as_json=as_json))
        return
    from zeroplan.planner.explain import explain as derive

    explanations = derive(flags.request(locals()), line)
    if as_json:
        from zeroplan.report.explanation import explanation_json

        typer.echo(json.dumps({"schema": 1, "plans": explanation_json(explanations)}, indent=2))
    else:
        from zeroplan.report.explanation import explanation_text

        typer.echo(explanation_text(explanations))


def _time(request: Request, *, as_json: bool) -> str:
    from zeroplan.report.work import time_json, time_text
    from zeroplan.search.explain_time import explain_time

    found = explain_time(request)
    return json.dumps({"schema": 1, "plans": time_json(found)}, indent=2) if as_json else time_text(found)
