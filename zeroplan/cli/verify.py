"""``zeroplan verify``: run the training for a few steps here, and hold the plan against what it used."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from zeroplan.cli import flags
from zeroplan.cli.main import app
from zeroplan.core.errors import EXIT_OUT_OF_TOLERANCE

_RUN = "Run"
Ranks = Annotated[int | None, typer.Option("--gpus", rich_help_panel=_RUN, help="Ranks to run. [every GPU; 2 on a CPU]")]
EngineName = Annotated[
    str, typer.Option("--engine", rich_help_panel="Sharding", help="zeroplan (the included runtime), fsdp2, ddp or deepspeed.")
]
Tolerance = Annotated[
    float, typer.Option("--tolerance", rich_help_panel=_RUN, help="How far the total may be off; owned buffers must be equal.")
]
Steps = Annotated[int, typer.Option("--steps", rich_help_panel=_RUN, help="Optimizer steps.")]
Timeout = Annotated[
    float, typer.Option("--timeout", rich_help_panel=_RUN, help="Seconds without a sign of life after which a run is ended.")
]
Style = Annotated[str, typer.Option("--format", help="plain, github, html or csv.")]


@app.command()
def verify(
    model: flags.Model = None,
    micro_batch: flags.MicroBatch = None,
    seq_len: flags.SeqLen = None,
    grad_accum: flags.GradAccum = None,
    dtype: flags.Dtype = None,
    optimizer: flags.OptimizerName = None,
    gradient_checkpointing: flags.Checkpointing = False,
    attn: flags.Attn = "sdpa",
    lora_rank: flags.LoraRank = None,
    lora_targets: flags.LoraTargets = None,
    engine: EngineName = "zeroplan",
    stage: flags.Stage = None,
    offload_optimizer: flags.OffloadOptimizer = None,
    offload_param: flags.OffloadParam = None,
    ds_config: flags.DsConfig = None,
    gpus: Ranks = None,
    tolerance: Tolerance = 0.02,
    steps: Steps = 3,
    timeout: Timeout = 300.0,
    token: flags.Token = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    style: Style = "plain",
    as_json: flags.Json = False,
) -> None:
    """Train MODEL for a few steps on this machine and print plan beside measurement; exits with 3 outside the tolerance.

    Weights are random. Without MODEL a built-in set runs, which ends within five minutes.
    """
    from zeroplan.validate.api import verify as run

    options: dict[str, Any] = {
        "micro_batch": micro_batch,
        "seq_len": seq_len,
        "grad_accum": grad_accum,
        "dtype": dtype,
        "optimizer": optimizer,
        "gradient_checkpointing": gradient_checkpointing,
        "attn": attn,
        "lora_rank": lora_rank,
        "lora_targets": flags.names(lora_targets),
        "engine": engine,
        "stage": stage,
        "offload_optimizer": offload_optimizer,
        "offload_param": offload_param,
        "ds_config": ds_config,
        "token": token,
        "trust_remote_code": trust_remote_code,
    }
    drift = run(model, gpus=gpus, tolerance=tolerance, steps=steps, timeout=timeout, **options)
    if _first_rank():
        if as_json:
            typer.echo(drift.to_json())
        else:
            from zeroplan.report.drift import drift_text

            typer.echo(drift_text(drift, style))
    if not drift.within:
        raise typer.Exit(EXIT_OUT_OF_TOLERANCE)


def _first_rank() -> bool:
    """Within a torchrun only the first rank prints."""
    import os

    return os.environ.get("RANK", "0") == "0"
