"""Runs one job on this rank and returns its measurement, also when the run ends early."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.losses import IGNORED_LABEL, labelled_tokens
from zeroplan.core.workload import Compilation, GradientCheckpointing, Lora, Precision
from zeroplan.engines.base import Engine
from zeroplan.engines.registry import load_engine
from zeroplan.engines.verification import Trainer, TrainingRun
from zeroplan.tape.options import Checkpointing, TracedTechnique, TraceOptions
from zeroplan.trace.run import loss_of
from zeroplan.validate.job import VerifyJob
from zeroplan.validate.rank.probe import Probe, RankDevice, bytes_written
from zeroplan_runtime.regional_compilation import compile_blocks
from zeroplan_runtime.units import find_blocks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2"}
#: Weights repeat a random pattern of this many elements: memory does not depend on their values, and they are made quickly.
_PATTERN = 1 << 20


def make_model(job: VerifyJob, dtype: torch.dtype, *, cheap: bool = False) -> Any:
    """Build the transformers model of the job's config on the current device, in training mode.

    `cheap` skips transformers' initialisation and fills the weights with a repeated random pattern. A user's own module is
    as it was given, whatever the dtype.
    """
    if job.live is not None:
        return job.live.make()
    import transformers
    from transformers.initialization import no_init_weights

    transformers.utils.logging.set_verbosity_error()
    values = {k: v for k, v in job.model.items() if k not in ("auto_map", "quantization_config", "torch_dtype", "dtype")}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    build = getattr(transformers, job.auto_class).from_config
    if cheap:
        with no_init_weights():
            model = build(config, dtype=dtype, attn_implementation=_ATTENTION[job.workload.numerics.attn])
        model.tie_weights()  # which initialisation would have done
        fill(model)
    else:
        model = build(config, dtype=dtype, attn_implementation=_ATTENTION[job.workload.numerics.attn])
    return model.train()


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Fill matrices with random values of deviation 0.02, biases with zeros and other vectors with ones."""
    pattern = torch.randn(_PATTERN) * 0.02
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        if parameter.dim() < 2:
            flat.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        for begin in range(0, flat.numel(), _PATTERN):
            part = flat[begin : begin + _PATTERN]
            part.copy_(pattern[: part.numel()])


def prepare(job: VerifyJob, model: Any) -> Any:
    """Add the job's adapters and checkpointing, compile its blocks, switch off its key-value cache, and return the model."""
    if job.live is not None:
        from zeroplan.validate.live import prepared

        return prepared(model)
    work = job.workload
    lora, again, compiled = work.technique(Lora), work.technique(GradientCheckpointing), work.compile
    if lora is not None:
        from zeroplan.trace.build import with_adapters

        techniques = [one for one in work.techniques if isinstance(one, TracedTechnique)]
        fp32 = work.numerics.precision is Precision.HALF_AUTOCAST
        model = with_adapters(model, lora.rank, lora.targets, fp32=fp32, techniques=techniques)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.config.use_cache = False
    if again is not None:
        if lora is not None:
            base.enable_input_require_grads()
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": again.reentrant})
    if compiled is not None:
        from zeroplan.trace.build import without_cache

        without_cache(base)
    if compiled is Compilation.CHECKPOINTED:
        compile_blocks(model)
    elif compiled is not None:
        for block in find_blocks(model).values():
            block.compile()
    return model


def make_batch(job: VerifyJob, device: torch.device, seed: int, *, casts: bool) -> dict[str, torch.Tensor]:
    """Make one micro batch of random values, of the shapes that the job's tape was traced with.

    A user's own batch keeps its values; where the engine `casts` modules, its floating tensors take the job's dtype.
    """
    if job.live is not None:
        return job.live.batch_on(device, DTYPES[job.workload.numerics.dtype] if casts else None)
    from zeroplan.trace.build import build_inputs, vocabulary_of
    from zeroplan.trace.fit import TracePoint

    batch, numerics = job.workload.batch, job.workload.numerics
    options = TraceOptions(numerics.attn, Checkpointing.NONE, target_len=batch.target_len or 0)
    shapes = build_inputs(job.model, job.auto_class, options, TracePoint(batch.micro_batch, batch.seq_len or 1, 0))
    generator = torch.Generator().manual_seed(seed)
    classes = int(job.model.get("num_labels") or 2)
    made: dict[int, torch.Tensor] = {}
    for name, meta in shapes.items():
        if id(meta) in made:
            continue
        if meta.is_floating_point():
            value = torch.randn(meta.shape, generator=generator).to(DTYPES[job.workload.numerics.dtype])
        else:
            most = classes if name == "labels" and meta.dim() == 1 else max(4, vocabulary_of(job.model))
            value = torch.randint(0, most, meta.shape, generator=generator)
        made[id(meta)] = value.to(device)
    inputs = {name: made[id(meta)] for name, meta in shapes.items()}
    if batch.labelled_share is not None and "labels" in inputs:
        inputs["labels"] = with_labelled_share(inputs["labels"], batch.labelled_share)
    return inputs


def with_labelled_share(labels: torch.Tensor, share: float) -> torch.Tensor:
    """Return `labels` [batch, tokens] with a share of them left, as many as a plan takes, and none on a sample's first token.

    A causal model has no loss on that one, so all that are left count in either kind of model.
    """
    later = torch.arange(labels.numel(), device=labels.device).view_as(labels)[:, 1:].flatten()
    wanted = min(labelled_tokens(labels.numel(), share), later.numel())
    at = later[torch.arange(wanted, device=labels.device) * later.numel() // wanted]
    left = torch.full_like(labels, IGNORED_LABEL).flatten()
    left[at] = labels.flatten()[at]
    return left.view_as(labels)


#: Called with a line of text about what the rank does next.
Say = Callable[[str], None]
_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+) ?(B|bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_VERSIONS = ("torch", "transformers", "deepspeed", "peft")


def run_job(job: VerifyJob, place: RankDevice, say: Say) -> dict[str, Any]:
    """Run a job and return this rank's figures; ``out_of_memory`` or ``bad_input`` is there where the run ended early."""
    engine = load_engine(job.engine_path)
    probe = Probe(place)
    state: dict[str, Any] = {"trained": None}
    begun = time.time()
    result: dict[str, Any] = {"rank": this_rank()}
    try:
        result |= _train(job, engine, place, probe, say, state)
    except BadInput as error:
        result["bad_input"] = {"what": error.what, "where": error.where, "remedy": error.remedy}
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        result["out_of_memory"] = _out_of_memory(error, probe, state["trained"])
    result |= probe.figures()
    trained = state.pop("trained")
    if trained is not None:
        result["rows"] = trained.rows()
        result["owned"] = trained.owned
        result["pinned"] += trained.pinned()
        result["files"] = bytes_written(job.swap_folders, begun)
        trained.close()
    del trained
    gc.collect()
    return result


def _train(job: VerifyJob, engine: Engine, place: RankDevice, probe: Probe, say: Say, state: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    seconds: list[float] = []
    with probe.counting():

        def mark(phase: str, following: str) -> None:
            probe.end(phase, following)
            say(f"{phase} done")

        say("building the model")
        trained = state["trained"] = _trainer(job, engine, place.device, mark)
        batch = make_batch(job, place.device, seed=job.layout.sample_of(this_rank()), casts=engine.casts_modules)
        for index in range(job.steps):
            say(f"step {index + 1} of {job.steps}")
            begin = time.perf_counter()
            loss = trained.step(batch)
            probe.end("step", "forward")
            seconds.append(time.perf_counter() - begin)
        value = None if loss is None else float(loss.detach())
        del loss, batch  # a training loop has dropped them by now, too
        live = probe.allocated()
    return {
        "live_after_step": live,
        "step_seconds": statistics.median(seconds[1:] or seconds),
        "steps": job.steps,
        "loss": value,
        "versions": _versions(),
    }


def _trainer(job: VerifyJob, engine: Engine, device: torch.device, mark: Callable[[str, str], None]) -> Trainer:
    """Build the engine's trainer of the job's model."""
    module, _, name = engine.trainer.partition(":")
    build: Callable[[TrainingRun], Trainer] = getattr(import_module(module), name)
    return build(
        TrainingRun(
            stage=job.stage,
            workload=job.workload,
            ds_config=job.ds_config,
            device=device,
            mark=mark,
            make_model=partial(make_model, job),
            prepare=partial(prepare, job),
            loss_of=loss_of,
            layout=job.layout,
            schedule=job.schedule,
            partition=job.partition,
        )
    )


def this_rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text or "out of memory" in text


def _out_of_memory(error: BaseException, probe: Probe, trained: Trainer | None) -> dict[str, Any]:
    text = str(error)
    found = _ASKED.search(text)
    asked = round(float(found[1]) * _UNITS[found[2]]) if found else None
    plain = re.search(r"tried to allocate (\d+) bytes", text)
    if plain:
        asked = int(plain[1])
    where = trained.where() if trained is not None else ""
    return {
        "phase": probe.phase,
        "buffer": _buffer_of(error, probe.phase) + (f" ({where})" if where else ""),
        "requested": asked,
        "allocated": probe.allocated(),
        "message": text.splitlines()[0][:300] if text else type(error).__name__,
    }


#: The buffer that a phase allocates, for a failing call that names none.
_OF_PHASE = {"load": Buffer.HOST_MODEL, "init": Buffer.INIT_TEMP, "step": Buffer.OPTIM_TEMP}


def _buffer_of(error: BaseException, phase: str) -> str:
    """The buffer that was being allocated: the variable ``buffer`` of the innermost frame that has one, as the Arena's."""
    trace, found = error.__traceback__, None
    while trace is not None:
        named = trace.tb_frame.f_locals.get("buffer")
        found = named if isinstance(named, Buffer) else found
        trace = trace.tb_next
    return str(found or _OF_PHASE.get(phase, Buffer.ACTIVATION))
