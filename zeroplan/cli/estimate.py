"""``zeroplan estimate``: the memory of one model at every stage and offload, or at the one asked for."""

from __future__ import annotations

from typing import Annotated

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import app
from zeroplan.core.errors import EXIT_DOES_NOT_FIT


@app.command()
def estimate(
    model: flags.Model = None,
    params: flags.Params = None,
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
    cpu_ram: flags.CpuRam = None,
    nvme: flags.Nvme = None,
    engine: flags.EngineName = "deepspeed",
    stage: flags.Stage = None,
    offload_optimizer: flags.OffloadOptimizer = None,
    offload_param: flags.OffloadParam = None,
    ds_config: flags.DsConfig = None,
    depth: flags.Depth = None,
    alloc_conf: flags.AllocConf = "",
    token: flags.Token = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    style: Annotated[str, typer.Option("--format", help="plain, github, html or csv.")] = "plain",
    as_json: flags.Json = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when no listed plan fits.")] = False,
) -> None:
    """Predict GPU, host and disk memory of training MODEL at every ZeRO stage and offload."""
    from zeroplan.planner.estimate import estimate_report

    request = flags.request(locals())
    report = estimate_report(request)
    if as_json:
        typer.echo(report.to_json())
    else:
        from zeroplan.report.text import report_text

        typer.echo(report_text(report, style))
    if check and not any(plan.fits for plan in report.plans):
        raise typer.Exit(EXIT_DOES_NOT_FIT)
