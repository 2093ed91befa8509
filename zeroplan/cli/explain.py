"""``zeroplan explain``: how every byte of a plan was derived."""

from __future__ import annotations

from typing import Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import app


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
    token: flags.Token = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    as_json: flags.Json = False,
) -> None:
    """Derive every line of MODEL's plans with your numbers: the formula, its values, its source."""
    from zeroplan.planner.explain import explain as derive

    explanations = derive(flags.request(locals()), line)
    if as_json:
        import json

        from zeroplan.report.explanation import explanation_json

        typer.echo(json.dumps({"schema": 1, "plans": explanation_json(explanations)}, indent=2))
    else:
        from zeroplan.report.explanation import explanation_text

        typer.echo(explanation_text(explanations))
